"""The shape of GroupBERT (Chelombiev et al. 2021, arXiv 2106.05822)."""

from typing import ClassVar, Literal

from bert_cli.facts.bert import BertConfig
from bert_cli.facts.products import Product
from bert_cli.settings.numbers import Positive
from bert_cli.settings.settings import SettingError


class GroupBertConfig(BertConfig):
    """The shape of GroupBERT: a layer has a convolution, a feed-forward, attention and a second feed-forward."""

    DIVISORS: ClassVar = (
        *BertConfig.DIVISORS,
        ("conv_group_size", "hidden_size"),
        ("ffn_groups", "hidden_size"),
        ("ffn_groups", "intermediate_size"),
    )
    LAYER_NORMS: ClassVar = 5
    IS_PRE_NORM = True

    architecture: Literal["groupbert"] = "groupbert"
    conv_kernel_size: Positive = 7
    """Positions that the convolution of a GroupBERT layer reads; an odd number."""
    conv_group_size: Positive = 16
    """Channels in a group of the convolution; must divide the hidden size."""
    ffn_groups: Positive = 4
    """Groups of the second product of a feed-forward; must divide the hidden and the intermediate size."""

    def products(self, rows: int) -> list[Product]:
        """Return the matrix products of a layer: convolution, attention, two feed-forwards."""
        width = self.hidden_size
        inner = self.intermediate_size
        square = Product(rows, width, width)
        groups = width // self.conv_group_size
        convolution = [
            square,
            square._replace(has_own_input=False),
            square._replace(groups=groups, kernel_size=self.conv_kernel_size),
            square,
        ]
        feed_forward = [
            Product(rows, width, inner, is_activated=True),
            Product(rows, inner, width, groups=self.ffn_groups),
        ]
        if self.ffn_groups > 1:
            feed_forward.append(square)
        return [*convolution, *self.attention_products(rows), *feed_forward * 2]

    def _check(self) -> None:
        if self.conv_kernel_size % 2 == 0:
            problem = f"{self.conv_kernel_size} is even, so the convolution has no middle position"
            raise SettingError("conv_kernel_size", problem, "choose an odd number")
