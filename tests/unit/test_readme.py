"""README and docs/ tell the truth: examples run; options, files, names and bytes exist."""

from __future__ import annotations

import json
import re
import runpy
import shlex
from importlib import import_module
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest

from prfaas.cli import main
from prfaas.core import TransferId
from prfaas.runtime.messages import TRANSFER
from prfaas.transfer import Renew, encode
from prfaas.wire.frames import Kind, PutHeader, encode_ack, encode_frame, encode_put
from two_clusters import parse_args

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/design.md", "docs/wire.md", "docs/glossary.md", "docs/growth.md")
TEXT = {page: (ROOT / page).read_text() for page in PAGES}
README = TEXT["README.md"]
SEAMS = ("ModelSpec", "HybridKVCache", "Transport", "Router", "RoleBalancer", "Engine", "Capacity")

FENCE = re.compile(r"^```(\w*) ?(.*)\n((?:.*\n)*?)```$", re.MULTILINE)
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^):#]+)\)")
FILE = re.compile(r"[\w./-]+\.(?:py|md|toml|txt)")
DOTTED = re.compile(r"prfaas(?:\.\w+)+")


def blocks(page: str, language: str) -> dict[str, str]:
    """Fenced blocks of a language by label or heading, each at the line it has in the page."""
    text, found = TEXT[page], {}
    for fence in FENCE.finditer(text):
        if fence[1] == language:
            name = fence[2] or HEADING.findall(text, 0, fence.start())[-1]
            assert name not in found, f"{page} has two {language} blocks under {name!r}"
            found[name] = "\n" * text.count("\n", 0, fence.start(3)) + fence[3]
    return found


def spans(page: str) -> list[str]:
    """What stands between backticks outside of fenced blocks."""
    return SPAN.findall(FENCE.sub("", TEXT[page]))


EXAMPLES = blocks("README.md", "python")


@pytest.mark.parametrize("heading", EXAMPLES)
def test_the_example_runs(heading: str) -> None:
    if "prfaas.integrations.transformers" in EXAMPLES[heading]:
        pytest.importorskip("transformers")
    exec(compile(EXAMPLES[heading], str(ROOT / "README.md"), "exec"), {"__name__": "readme"})


@pytest.mark.parametrize("seam", SEAMS)
def test_each_part_has_an_example(seam: str) -> None:
    assert any(heading.startswith(f"{seam}: ") for heading in EXAMPLES)


def test_the_demo_takes_every_option_that_is_named() -> None:
    demo = README.split("## Each part alone")[0]
    named = [span for span in SPAN.findall(FENCE.sub("", demo)) if span.startswith("--")]
    assert named
    for span in named:
        parse_args(shlex.split(span))


def test_the_deployment_file_gives_the_figures_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (text,) = blocks("README.md", "toml").values()
    config = tmp_path / "run.toml"
    config.write_text(text)
    assert main(["plan", str(config), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    for form in ("mean", "expectation"):
        best = plan[form]["best"]
        assert f"{best['threshold_tokens']:,.0f}" in README
        assert f"{best['requests_per_s']:.3f}" in README


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_is_named_exists(page: str) -> None:
    named = [ROOT / span for span in spans(page) if FILE.fullmatch(span)]
    named += [(ROOT / page).parent / target for target in LINK.findall(TEXT[page])]
    named += [ROOT / path for path in re.findall(r"(?<=python )\S+\.py", TEXT[page])]
    assert [path for path in named if not path.exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_make_target_that_is_named_exists(page: str) -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = [*spans(page), *"\n".join(blocks(page, "sh").values()).splitlines()]
    assert {c.split()[1] for c in commands if c.startswith("make ")} <= targets


@pytest.mark.parametrize("page", PAGES)
def test_every_dotted_name_exists(page: str) -> None:
    for name in filter(DOTTED.fullmatch, spans(page)):
        resolve(name)


def resolve(name: str) -> object:
    """The object of a dotted name; the longest importable part of it is the module."""
    module, _, rest = name, "", ""
    while module:
        try:
            found: object = import_module(module)
        except ModuleNotFoundError:
            module, _, last = module.rpartition(".")
            rest = f"{last}.{rest}" if rest else last
            continue
        for attribute in filter(None, rest.split(".")):
            found = getattr(found, attribute)
        return found
    raise AssertionError(name)


@pytest.mark.parametrize("page", ["README.md", "docs/design.md"])
def test_the_floors_are_those_of_the_floor_test(page: str) -> None:
    floors = runpy.run_path(str(Path(__file__).with_name("test_floors.py")))["FLOOR"]
    rows = re.findall(r"^(?:\| )?(\d) (.*)$", TEXT[page], re.MULTILINE)
    for room, floor in floors.items():
        holders = [int(digit) for digit, row in rows if re.search(rf"\b{room}\b", row)]
        assert floor in holders or room in ("__init__", "__main__"), f"{room} is on floor {floor}"


def test_the_bytes_of_the_wire_page_are_those_of_the_code() -> None:
    payload = b"state"
    put = PutHeader(
        token=bytes(range(16)),
        offset=4096,
        num_bytes=len(payload),
        sequence=7,
        checksum=xxh3_64_intdigest(payload),
    )
    renew = TRANSFER + encode(Renew(transfer_id=TransferId("r#0")))
    assert {name: bytes.fromhex(text) for name, text in blocks("docs/wire.md", "hex").items()} == {
        "put": encode_put(put) + payload,
        "ack": encode_ack(7),
        "renew": encode_frame(Kind.CONTROL, renew),
    }


def test_the_wire_page_names_every_kind_and_message() -> None:
    text = TEXT["docs/wire.md"]
    messages = [kind.__struct_config__.tag for kind in Renew.__base__.__subclasses__()]
    assert messages
    for word in [*(kind.name for kind in Kind), *(f"`{message}`" for message in messages)]:
        assert word in text
