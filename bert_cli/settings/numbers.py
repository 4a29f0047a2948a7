"""The ranges of numbers in settings."""

from typing import Annotated

from pydantic import Field

Positive = Annotated[int, Field(ge=1)]
# A size for which memory is allocated before any other check could reject it.
Size = Annotated[int, Field(ge=1, le=10**7)]
# A number of devices, processes or replicas; a layout is searched among all of them.
Devices = Annotated[int, Field(ge=1, le=10**6)]
# A number of layers; each layer costs milliseconds before the memory of a run is checked.
Depth = Annotated[int, Field(ge=1, le=1000)]
# Tokens of a sequence.
Length = Annotated[int, Field(ge=8)]
Probability = Annotated[float, Field(ge=0.0, lt=1.0)]
Fraction = Annotated[float, Field(gt=0.0, lt=1.0)]
UpToOne = Annotated[float, Field(gt=0.0, le=1.0)]
