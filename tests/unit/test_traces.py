"""Trace readers on small samples: values, order, prefixes, and errors that say where."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from prfaas.errors import ConfigError
from prfaas.traces import (
    TRACE_FORMATS,
    Trace,
    detect,
    read_azure,
    read_burstgpt,
    read_mooncake,
    read_trace,
)


def mooncake_line(at_ms: float, num_tokens: int, output: int, ids: list[int], **more: Any) -> str:
    row = {
        "timestamp": at_ms,
        "input_length": num_tokens,
        "output_length": output,
        "hash_ids": ids,
    }
    return json.dumps({**row, **more}) + "\n"


MOONCAKE = [
    mooncake_line(2000, 1100, 5, [0, 1, 2]),
    "\n",
    mooncake_line(1000, 512, 3, [0]),
    mooncake_line(2500, 1536, 0, [0, 1, 3]),
    mooncake_line(2600, 0, 4, []),
]
AZURE = [
    "TIMESTAMP,ContextTokens,GeneratedTokens\n",
    "2023-11-16 18:17:03.9799600,4808,10\n",
    "2023-11-16 18:17:02.4799600,110,0\n",
    "2023-11-16T18:17:04.5,12,7\n",
    "2023-11-16 18:17:05,0,7\n",
]
BURSTGPT = [
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n",
    "5,ChatGPT,472,18,490,Conversation log\n",
    '45.5,"GPT-4, the large",1087,230,1317,API log\n',
    "118,GPT-4,417,0,417,Conversation log\n",
    "120,GPT-4,0,3,3,Conversation log\n",
]


def test_mooncake_is_sorted_starts_at_0_and_knows_its_prefixes() -> None:
    trace = read_mooncake(iter(MOONCAKE))
    assert [a.request_id for a in trace.arrivals] == ["3", "1", "4"]
    assert [a.arrived_s for a in trace.arrivals] == [0.0, 1.0, 1.5]
    assert [(a.num_tokens, a.output_tokens) for a in trace.arrivals] == [
        (512, 3),
        (1100, 5),
        (1536, 1),
    ]
    short, middle, long = (a.granule_hashes for a in trace.arrivals)
    assert [len(short), len(middle), len(long)] == [1, 2, 3]
    assert short == middle[:1] == long[:1]
    assert middle == long[:2]
    assert len(set(long)) == 3
    assert all(len(key) == 16 for key in long)
    assert (trace.granule_tokens, trace.num_skipped, trace.name) == (512, 1, "mooncake")


def test_hashes_of_differently_named_traces_never_meet() -> None:
    one, other = (read_mooncake(MOONCAKE, name=name) for name in ("one", "other"))
    assert (
        one.arrivals[0].granule_hashes
        == read_mooncake(MOONCAKE, name="one").arrivals[0].granule_hashes
    )
    keys = [{key for a in t.arrivals for key in a.granule_hashes} for t in (one, other)]
    assert not keys[0] & keys[1]


def test_what_an_unlimited_cache_would_hold() -> None:
    trace = read_mooncake(
        [
            mooncake_line(0, 1100, 1, [0, 1, 2]),
            mooncake_line(1, 1536, 1, [0, 1, 3]),
            mooncake_line(2, 1024, 1, [0, 1]),  # known from end to end: one token is computed
            mooncake_line(3, 1536, 1, [7, 1, 3]),  # what follows a miss is no hit
        ]
    )
    assert trace.cached_tokens() == (0, 1024, 1023, 0)
    assert trace.prefix_hit_share == pytest.approx((1024 + 1023) / (1100 + 1536 + 1024 + 1536))
    assert read_azure(AZURE).prefix_hit_share == 0.0


def test_azure_reads_seven_digits_and_counts_what_it_skips() -> None:
    trace = read_azure(iter(AZURE))
    assert [a.request_id for a in trace.arrivals] == ["3", "2", "4"]
    assert [a.arrived_s for a in trace.arrivals] == pytest.approx([0.0, 1.5, 2.02004], abs=2e-6)
    assert [(a.num_tokens, a.output_tokens) for a in trace.arrivals] == [
        (110, 1),
        (4808, 10),
        (12, 7),
    ]
    assert (trace.granule_tokens, trace.num_skipped) == (None, 1)
    assert trace.arrivals[0].granule_hashes == ()


def test_azure_times_with_an_offset_are_the_same_moments() -> None:
    rows = [AZURE[0], "2024-05-10 00:00:00+00:00,1,1", "2024-05-10 02:00:01+02:00,1,1"]
    assert read_azure(rows).duration_s == pytest.approx(1.0)


def test_azure_times_without_an_offset_are_utc_wherever_one_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A zone that puts its clocks back between the two moments, so that local time lies.
    monkeypatch.setenv("TZ", "EST5EDT,M3.2.0,M11.1.0")
    time.tzset()
    try:
        trace = read_azure([AZURE[0], "2023-11-05 00:00:00,1,1", "2023-11-05 04:00:00,1,1"])
    finally:
        monkeypatch.undo()
        time.tzset()
    assert trace.duration_s == 4 * 3600


def test_burstgpt_skips_failed_requests_and_counts_them() -> None:
    trace = read_burstgpt(iter(BURSTGPT))
    assert [(a.arrived_s, a.num_tokens, a.output_tokens) for a in trace.arrivals] == [
        (0.0, 472, 18),
        (40.5, 1087, 230),
    ]
    assert trace.num_skipped == 2


def test_columns_may_come_in_another_order_with_others_and_a_byte_order_mark() -> None:
    lines = ["\ufeffContextTokens,x,TIMESTAMP,GeneratedTokens", "3,,2024-01-01,4"]
    assert read_azure(lines).arrivals[0].num_tokens == 3
    assert detect(["\ufeffTIMESTAMP,ContextTokens,GeneratedTokens"]) == "azure"


def test_summary_of_lengths() -> None:
    rows = [f"{i},m,{(i + 1) * 10},{i + 1},0,l" for i in range(20)]
    trace = read_burstgpt([BURSTGPT[0], *rows])
    assert trace.duration_s == 19.0
    assert trace.mean_tokens == 105.0
    assert trace.median_tokens == 105.0
    assert trace.p90_tokens == 180
    assert trace.mean_output_tokens == 10.5


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("{oops", r"line 2: the line is '\{oops'; it must be one JSON object"),
        ("[1]", r"line 2: the line is '\[1\]'; it must be one JSON object"),
        ('{"timestamp": 1}', "line 2: lacks input_length, output_length, hash_ids"),
        (mooncake_line(0, -1, 1, []), "line 2: input_length is -1"),
        (mooncake_line(0, 1, 1, [], input_length=True), "line 2: input_length is True"),
        (mooncake_line(0, 1, 1, [], output_length=1.5), "line 2: output_length is 1.5"),
        (mooncake_line(0, 1, 1, [], timestamp="soon"), "line 2: timestamp is 'soon'"),
        (mooncake_line(0, 1, 1, [], timestamp=None), "line 2: timestamp is None"),
        (mooncake_line(0, 1, 1, [], timestamp="inf"), "line 2: timestamp is 'inf'"),
        (mooncake_line(0, 1, 1, [-3]), r"line 2: hash_ids is \[-3\]"),
        (mooncake_line(0, 1, 1, [], hash_ids=7), "line 2: hash_ids is 7"),
        (mooncake_line(0, 512, 1, [1, 2]), "one id per 512 of the 512 tokens"),
    ],
)
def test_mooncake_errors_name_line_field_and_value(line: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        read_mooncake([MOONCAKE[0], line])


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ([AZURE[0], "hello,1,1"], "line 2: TIMESTAMP is 'hello'; it must be a time such as"),
        ([AZURE[0], AZURE[1], "2024-01-01,x,1"], "line 3: ContextTokens is 'x'"),
        ([AZURE[0], "2024-01-01,1,1.5"], "line 2: GeneratedTokens is '1.5'"),
        ([AZURE[0], "2024-01-01,1"], "line 2: 2 fields where the header has 3"),
        ([AZURE[0], '2024-01-01,1,"1'], "line 2: unexpected end of data"),
        (["a,b"], "line 1: the header is 'a,b' and lacks TIMESTAMP, ContextTokens"),
        ([], "line 1: the header is '' and lacks"),
        ([AZURE[0]], r"the azure trace has no requests \(0 rows were skipped\)"),
    ],
)
def test_csv_errors_name_line_field_and_value(lines: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        read_azure(lines)
    with pytest.raises(ConfigError, match="line 2: Timestamp is '2023-01-01'; it must be a number"):
        read_burstgpt([BURSTGPT[0], "2023-01-01,m,1,1,2,l"])


def test_the_value_in_an_error_is_cut() -> None:
    with pytest.raises(ConfigError) as caught:
        read_mooncake(["x" * 10_000])
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    ("name", "lines"), [("mooncake", MOONCAKE), ("azure", AZURE), ("burstgpt", BURSTGPT)]
)
def test_formats_are_told_from_the_first_lines(name: str, lines: list[str]) -> None:
    assert detect(["\n", *lines[:1]]) == name
    told = read_trace(iter(lines))
    assert told == read_trace(lines, format_name=name)
    assert told.name == name
    assert read_trace(lines, name="mine").name == "mine"


def test_a_long_trace_is_read_to_its_end() -> None:
    lines = [mooncake_line(i, 10, 1, [i]) for i in range(40)]
    assert len(read_trace(iter(lines)).arrivals) == 40


def test_unknown_formats() -> None:
    with pytest.raises(ConfigError, match="starts with 'hello', which is no known format"):
        detect(["hello"])
    with pytest.raises(ConfigError, match="starts with '', which is no known format"):
        read_trace([])
    with pytest.raises(ConfigError, match="trace format 'csv' is not known; known are mooncake"):
        read_trace(AZURE, format_name="csv")
    assert list(TRACE_FORMATS) == ["mooncake", "azure", "burstgpt"]


def test_a_trace_has_requests() -> None:
    with pytest.raises(ConfigError, match="has no requests"):
        Trace(name="empty", arrivals=())
