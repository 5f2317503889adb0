"""The figures that arXiv 2604.15039 prints, as printed."""

from __future__ import annotations

from types import MappingProxyType

import attrs

from prfaas.errors import ConfigError


@attrs.frozen(kw_only=True)
class Printed:
    """A number as it stands in the paper.

    Attributes:
        value: in the unit that the paper uses.
        half_width: half of the last printed digit: what rounding can hide.
        loose: the paper says "about" or draws it, so its last digit is not meant exactly.
        upper_bound: the paper only says "less than".
    """

    value: float
    half_width: float
    loose: bool = False
    upper_bound: bool = False

    def holds(self, ours: float) -> bool:
        """Whether ``ours``, rounded as the paper rounds, is what the paper prints."""
        if self.upper_bound:
            return ours < self.value
        return abs(ours - self.value) <= self.half_width * (1 + 1e-9)


def printed(text: str, *, step: float | None = None) -> Printed:
    """Read ``"3.24"``, ``"about 13"`` or ``"< 100"``.

    Args:
        step: unit of the last digit that counts; by default that of the last decimal.

    Raises:
        ConfigError: no number in the text.
    """
    number = text.removeprefix("about ").removeprefix("< ")
    try:
        value = float(number)
    except ValueError as error:
        raise ConfigError(f'{text!r} is not "3.24", "about 13" or "< 100"') from error
    if step is None:
        step = 10.0 ** -len(number.partition(".")[2])
    return Printed(
        value=value,
        half_width=step / 2,
        loose=text.startswith("about "),
        upper_bound=text.startswith("< "),
    )


LENGTHS_PRINTED = MappingProxyType({"1K": 1024, "8K": 8192, "32K": 32_000, "128K": 130_000})
"""The printed lengths and the tokens they mean in Table 5; assumed for Table 3 too."""

MODELS = MappingProxyType(
    {
        "kimi-linear-48b": "Kimi Linear",
        "mimo-v2-flash": "MiMo-V2-Flash",
        "qwen3.5-397b": "Qwen3.5-397B",
        "ring-2.5-1t": "Ring-2.5-1T",
        "minimax-m2.5": "MiniMax-M2.5",
        "qwen3-235b": "Qwen3-235B",
    }
)
"""The columns of Table 3 by the name of our preset."""


def _by_length(*texts: str) -> MappingProxyType[str, Printed]:
    return MappingProxyType(dict(zip(LENGTHS_PRINTED, map(printed, texts), strict=True)))


TABLE_3 = MappingProxyType(
    {
        "kimi-linear-48b": _by_length("1.19", "2.29", "3.87", "4.88"),
        "mimo-v2-flash": _by_length("0.82", "2.85", "4.66", "4.71"),
        "qwen3.5-397b": _by_length("4.13", "6.28", "8.25", "7.47"),
        "ring-2.5-1t": _by_length("7.27", "4.47", "2.59", "1.46"),
        "minimax-m2.5": _by_length("4.94", "32.87", "59.93", "47.82"),
        "qwen3-235b": _by_length("4.12", "22.42", "33.35", "21.50"),
    }
)
"""KV throughput of one instance of 8 H200 in Gbps."""

TABLE_5_SIZES = _by_length("190.8", "308.9", "701.3", "2316.3")
"""S_kv of the 1T model in MiB."""

TABLE_5_SECONDS = _by_length("0.44", "0.72", "1.84", "7.40")
"""T_prefill of the 1T model on 8 H200 in s."""

TABLE_5_RATES = _by_length("3.61", "3.59", "3.19", "2.62")
"""KV throughput of the 1T model on 8 H200 in Gbps."""


@attrs.frozen(kw_only=True)
class Column:
    """One deployment of Table 6; rates in requests/s, times in s; None where it prints a dash."""

    num_prefill: Printed | None
    num_decode: Printed
    prfaas_rps: Printed | None
    prefill_rps: Printed | None
    decode_rps: Printed
    max_rate_rps: Printed
    mean_ttft_s: Printed
    p90_ttft_s: Printed


TABLE_6 = MappingProxyType(
    {
        "PrfaaS-PD": Column(
            num_prefill=printed("3"),
            num_decode=printed("5"),
            prfaas_rps=printed("1.61"),
            prefill_rps=printed("1.64"),
            decode_rps=printed("3.91"),
            max_rate_rps=printed("3.24"),
            mean_ttft_s=printed("2.22"),
            p90_ttft_s=printed("3.51"),
        ),
        "homogeneous": Column(
            num_prefill=printed("9"),
            num_decode=printed("3"),
            prfaas_rps=None,
            prefill_rps=printed("2.11"),
            decode_rps=printed("2.35"),
            max_rate_rps=printed("2.11"),
            mean_ttft_s=printed("4.44"),
            p90_ttft_s=printed("9.73"),
        ),
        "naive": Column(
            num_prefill=None,
            num_decode=printed("8"),
            prfaas_rps=printed("2.45"),
            prefill_rps=None,
            decode_rps=printed("6.25"),
            max_rate_rps=printed("2.45"),
            mean_ttft_s=printed("1.74"),
            p90_ttft_s=printed("3.51"),
        ),
    }
)
"""The case study."""

BANDWIDTH_EXAMPLES = (
    (512, "minimax-m2.5", "32K", printed("3800", step=100)),
    (512, "qwen3-235b", "32K", printed("2100", step=100)),
    (512, "ring-2.5-1t", "32K", printed("about 170", step=10)),
    (512, "ring-2.5-1t", "128K", printed("< 100")),
    (10_000, "ring-2.5-1t", "128K", printed("about 1800", step=100)),
)
"""Section 2.3: H200 GPUs, model, length, and the Gbps that they send. The paper does not print the
last length; of the four only 128K gives its figure."""

CLAIMS = MappingProxyType(
    {
        "MiMo against MiniMax": printed("13"),
        "Qwen3.5 against Qwen3": printed("4"),
        "MLA against GQA": printed("about 4.5"),
        "7:1 layers": printed("about 8"),
        "Ring memory saving": printed("about 36"),
        "MiniMax latency": printed("about 5.5"),
        "mean length": printed("about 27"),
        "mean offloaded length": printed("about 44"),
        "offloaded share": printed("49.6"),
        "threshold": printed("19.4"),
        "egress": printed("about 13"),
        "saved prefill instances": printed("2"),
        "against homogeneous": printed("1.54"),
        "against naive": printed("1.32"),
        "naive against homogeneous": printed("1.16"),
        "mean TTFT against homogeneous": printed("0.50"),
        "P90 TTFT against homogeneous": printed("0.36"),
        "at equal cost": printed("about 1.15"),
    }
)
"""What the text and Table 6 claim. Gains are ratios: 1.54 is "+54 %", 0.36 is "64 % lower".
Lengths are thousands of tokens: 1000 for the threshold, 1024 for the means (both derived)."""
