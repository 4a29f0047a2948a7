"""The table of architectures, and the choice of a shape's class by the setting `architecture`."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, SerializeAsAny, ValidationError, ValidationInfo
from pydantic.fields import FieldInfo
from pydantic_core import InitErrorDetails

from bert_cli.config.groupbert import GroupBertConfig
from bert_cli.config.settings import SettingError
from bert_cli.config.shape import BertConfig

SHAPES: dict[str, type[BertConfig]] = {"bert": BertConfig, "groupbert": GroupBertConfig}
"""Architecture -> the class of its shape."""


def shape_of(values: Mapping[str, Any], context: Any = None) -> BertConfig:
    """Return the shape that settings describe.

    Raises ValidationError. Fields of other architectures must have their defaults: the settings.json of older runs of
    BERT lists those of GroupBERT.
    """
    name = values.get("architecture", BertConfig().architecture)
    kind = SHAPES.get(name) if isinstance(name, str) else None
    if kind is None:
        expected = {"expected": " or ".join(map(repr, SHAPES))}
        error = InitErrorDetails(
            type="literal_error", loc=("architecture",), input=name, ctx=expected
        )
        raise ValidationError.from_exception_data("bert_config", [error])
    fields = fields_of(BertConfig)
    foreign = {*values} & ({*fields} - {*kind.model_fields})
    for field in sorted(foreign):
        if str(values[field]) != str(fields[field].default):
            problem = f"has no effect with architecture {name!r}"
            raise SettingError(field, problem, "leave it out or change architecture")
    taken = {field: value for field, value in values.items() if field not in foreign}
    return kind.model_validate(taken, context=context)


def fields_of(group: type[BaseModel]) -> Mapping[str, FieldInfo]:
    """Return the fields of a group of settings; for the shape of a model those of all architectures."""
    if not issubclass(group, BertConfig):
        return group.model_fields
    fields: dict[str, FieldInfo] = {}
    texts: list[str] = []
    for shape in SHAPES.values():
        texts.append(str(shape.model_fields["architecture"].description).removesuffix("."))
        for name, about in shape.model_fields.items():
            fields.setdefault(name, about)
    fields["architecture"] = FieldInfo(
        annotation=Literal[tuple(SHAPES)],  # type: ignore[arg-type]
        default=BertConfig().architecture,
        description=f"{', or '.join(texts)}.",
    )
    return fields


def _validate(value: Any, info: ValidationInfo) -> Any:
    return shape_of(value, info.context) if isinstance(value, Mapping) else value


ModelShape = Annotated[BertConfig, BeforeValidator(_validate), SerializeAsAny()]
"""A shape of any architecture."""
