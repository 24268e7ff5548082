"""The report: its schema, what it says of the run, and that nothing in it can break out of the page."""

from __future__ import annotations

import html.parser
import importlib.resources
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo.conformance import provenance, suite
from octavo.conformance.facts import Facts
from octavo.conformance.finding import Finding
from octavo.conformance.gaps import load_gaps
from octavo.conformance.harness.host import HostBackend
from octavo.conformance.harness.result import CaseResult, Status
from octavo.conformance.report import figures, matrix, table
from octavo.conformance.report import html as page
from octavo.conformance.report import json as file
from octavo.conformance.session import Settings, conform
from octavo.conformance.verdict import verdict
from octavo.conformance.version import must_pass_hash
from octavo.core.backend import API_VERSION, BackendInfo
from octavo.core.base.errors import ConfigError

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def report() -> file.Report:
    return conform(Settings(backend="reference", only="rms_norm/float32-5x", seed=11, in_process=True))


def result(**changes: Any) -> CaseResult:
    base: dict[str, Any] = {
        "name": "gemm.exact/float32-m1",
        "op": "gemm",
        "axes": {"m": "1"},
        "lanes": ("exact",),
        "status": Status.PASS,
        "implementation": "own",
        "rerun": "octavo conform --only gemm.exact/float32-m1",
    }
    return CaseResult(**base | changes)


def test_the_schema_that_is_checked_in_is_the_schema_of_the_code() -> None:
    shipped = importlib.resources.files("octavo.conformance.report").joinpath("schema.json").read_text()
    assert json.loads(shipped) == json.loads(msgspec.json.encode(file.schema())), (
        "the report's structs have changed: raise SCHEMA_VERSION in conformance/report/json.py, then "
        "octavo conform schema > conformance/report/schema.json"
    )


def test_an_emulated_device_makes_no_claim_and_the_report_says_why(report: file.Report) -> None:
    real, emulated = (
        msgspec.structs.replace(
            report.run, profile="smoke", only="", capabilities=Facts.of(HostBackend(is_emulated=it).capabilities)
        )
        for it in (False, True)
    )
    isolated = msgspec.structs.replace(real, isolated=True)
    assert verdict(isolated, report.cases).is_claim
    judged = verdict(emulated, report.cases)
    assert not judged.is_claim
    assert judged.no_claim == "the device was not there, another one did its work (host)"


def test_a_whole_run_that_is_no_claim_says_so(report: file.Report) -> None:
    judged = msgspec.structs.replace(report.verdict, is_claim=False, no_claim="the chip was not there")
    whole = msgspec.structs.replace(report.run, only="")
    shown = msgspec.structs.replace(report, run=whole, verdict=judged)
    assert table.conclusion(shown)[-1] == "no claim about a device: the chip was not there"
    assert "the chip was not there" in page.render(shown)


def test_a_report_fits_its_schema(report: file.Report) -> None:
    """Field by field, by the schema as it is checked in."""
    schema = json.loads((ROOT / "conformance/report/schema.json").read_text())
    fits(json.loads(file.encode(report)), schema, schema["$defs"])


def fits(value: Any, schema: dict[str, Any], defs: dict[str, Any]) -> None:
    """The part of JSON schema that msgspec writes."""
    if "$ref" in schema:
        return fits(value, defs[schema["$ref"].rpartition("/")[2]], defs)
    if "anyOf" in schema:
        errors = []
        for option in schema["anyOf"]:
            try:
                return fits(value, option, defs)
            except AssertionError as error:
                errors.append(error)
        raise AssertionError(errors)
    if "enum" in schema:
        assert value in schema["enum"]
        return None
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool}
    if schema["type"] == "null":
        assert value is None
        return None
    assert isinstance(value, kinds[schema["type"]]), (value, schema)
    if schema["type"] == "array":
        for item in value:
            fits(item, schema.get("items", {"$ref": "any"}), defs)
    if schema["type"] == "object":
        known = schema.get("properties", {})
        assert set(schema.get("required", [])) <= set(value)
        for key, item in value.items():
            assert key in known or isinstance(schema.get("additionalProperties"), dict), key
            fits(item, known.get(key) or schema["additionalProperties"], defs)
    return None


def test_it_comes_back_as_it_was_written(report: file.Report) -> None:
    assert file.decode(file.encode(report)) == report


def test_it_says_what_was_run_on_what(report: file.Report) -> None:
    run = report.run
    assert (run.seed, run.backend, run.profile, run.only) == (11, "reference", "full", "rms_norm/float32-5x")
    assert run.plug_in.distribution == "octavo"
    assert run.device.name == run.capabilities.device_name == "host"
    assert set(run.must_pass) >= {"core", "smoke"}
    assert all(len(digest) == 16 for digest in run.must_pass.values())
    case = report.cases[0]
    assert case.rerun == f"octavo conform --backend reference --seed 11 --only {case.id}"
    assert 0 < float(case.share or 0) <= 1


def test_where_a_source_tree_is_tracked_its_commit_is_named() -> None:
    info = BackendInfo(
        name="cpu",
        api_version=API_VERSION,
        distribution="nonesuch",
        probe="octavo.backends.cpu.probe:probe",
        factory="octavo.backends.cpu.device:CpuBackend",
    )
    if not (ROOT / ".git").exists():
        pytest.skip("this copy is no checkout")
    found = provenance.plug_in(info)
    assert found.git is not None
    assert len(found.git) == 40
    assert found.dirty in (True, False)
    assert found.version is found.record_sha256 is None


def test_an_installed_package_is_named_by_its_record() -> None:
    info = BackendInfo(name="x", api_version=1, distribution="pytest", probe="pytest:x", factory="pytest:x")
    found = provenance.plug_in(info)
    assert found.version == pytest.__version__
    assert found.record_sha256 is not None
    assert len(found.record_sha256) == 64
    assert found.git is None


def test_infinite_and_undefined_errors_survive_as_text() -> None:
    for bad in (math.inf, math.nan):
        case = file.entry(result(share=bad, status=Status.FAIL))
        assert case.share == "inf"
        assert case.worst == math.inf
        assert msgspec.json.decode(msgspec.json.encode(case), type=file.Entry) == case


def test_the_error_beside_a_plain_implementation_is_kept() -> None:
    findings = [Finding(lane="statistical", output="out", compared=9, share=0.5, plain=p) for p in (1.25, None, 0.5)]
    assert file.entry(result(findings=findings)).plain == 1.25


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"not json", "is no report of"),
        (b'{"schema_version": 99}', "has schema version 99, not 1"),
        (b'{"schema_version": 1}', "is no report of"),
    ],
)
def test_what_is_no_report_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        file.decode(data)


def test_unknown_fields_are_refused(report: file.Report) -> None:
    document = json.loads(file.encode(report)) | {"surprise": 1}
    with pytest.raises(ConfigError, match="surprise"):
        file.decode(json.dumps(document).encode())


def test_the_table_names_the_worst_case_of_each_op(report: file.Report) -> None:
    cases = [
        file.entry(result(name="a/1", share=0.2)),
        file.entry(result(name="a/2", share=0.9, status=Status.FALLBACK, implementation="fallback")),
    ]
    (summary,) = table.by_op(cases)
    assert summary.worst is not None
    assert (summary.worst[0], summary.worst[1].id) == (0.9, "a/2")
    assert "rms_norm" in table.render(report)


def test_a_share_of_any_length_stands_apart_from_its_case(report: file.Report) -> None:
    long = msgspec.structs.replace(report, cases=[file.entry(result(name="a/1", share=0.00188123))])
    assert "0.00188  a/1" in table.render(long)


BUILT = {"registers": 40.0, "spill_bytes": 0.0, "loads_16": 6.0}


def test_figures_of_builds_stand_in_page_and_table_in_place_of_shares(report: file.Report) -> None:
    cases = [
        file.entry(result(name="gemm.a/1", figures=BUILT)),
        file.entry(result(name="gemm.b/1", figures=BUILT | {"registers": 168.0, "spill_bytes": 8.0})),
        file.entry(result(name="rotary.a/1", op="rotary", figures={"us": 3.14159, "share_of_limit": 0.7})),
    ]
    built = msgspec.structs.replace(report, cases=cases)
    lines = table.render(built).splitlines()
    assert [line.split("  ")[-1] for line in lines if line.startswith(("op ", "gemm", "rotary"))] == [
        "figures, from the least to the most",
        "registers 40–168 · spilled bytes 0–8",
        "µs 3.14 · share of limit 0.7",
    ]
    text = page.render(built)
    assert [figures.columns(block.entries) for block in page.blocks(cases)] == [
        {"registers": "registers", "spill_bytes": "spilled bytes", "loads_16": "loads 16"},
        {"us": "µs", "share_of_limit": "share of limit"},
    ]
    assert re.findall(r'<td class="n">([^<]*)', text) == ["40", "0", "6", "168", "8", "6", "3.14", "0.7"]
    assert "Closest to their bounds" not in text
    assert "Closest to their bounds" in page.render(report)


def test_a_case_without_a_figure_shows_none() -> None:
    assert [figures.plain(x) for x in (None, 0.0, 0.00123, 101376.0, 1234.56)] == [
        "-",
        "0",
        "0.00123",
        "101376",
        "1235",
    ]


class Links(html.parser.HTMLParser):
    """Tags and addresses of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]


def test_the_page_needs_nothing_else_and_escapes_what_a_plug_in_says(report: file.Report) -> None:
    evil = file.entry(
        result(detail="<script>alert(1)</script>", status=Status.FAIL, axes={"<b>": "<i>"}, share=math.inf)
    )
    text = page.render(msgspec.structs.replace(report, cases=[*report.cases, evil]))
    links = Links()
    links.feed(text)
    assert not {"script", "b><", "i", "link", "img"} & links.tags
    assert links.addresses == []
    assert "&lt;script&gt;" in text
    assert "light-dark(" in text


def test_the_page_has_a_cell_for_each_value_of_each_axis(report: file.Report) -> None:
    (block,) = page.blocks(report.cases)
    assert block.summary.op == "rms_norm"
    widths = [cell.value for cell in block.axes["width"]]
    assert widths == sorted(widths, key=int)
    assert sum(cell.cases for cell in block.axes["width"]) == len(report.cases)
    assert {cell.mood for cell in block.axes["width"]} == {"good"}


def test_the_matrix_goes_between_its_markers_and_nowhere_else(report: file.Report) -> None:
    document = f"before\n{matrix.begin('reference')}\nold\n{matrix.END}\nafter {matrix.END}\n"
    text = matrix.replaced(document, report, "x.md")
    assert text.startswith(f"before\n{matrix.begin('reference')}\nProfile `full`")
    assert text.endswith(f"{matrix.END}\nafter {matrix.END}\n")
    assert "old" not in text
    assert "| `rms_norm` | own " in text
    with pytest.raises(ConfigError, match="has no line <!-- conformance matrix: reference -->"):
        matrix.replaced("nothing", report, "x.md")


INTERPRETED = ("cuda", "rocm")
DOCUMENTED = ("cpu", "reference", *INTERPRETED)
TITLE = (
    r"Profile `(core|tiny)`: \*\*(met|NOT met)\*\*\. .+; \d+ cases in \d+ s, seed \d+; "
    r"suite \d+, must-pass hash `[0-9a-f]{16}`\."
)
ROW = (
    r"`\w+`",
    r"(own|composite|fallback) \d+( · (own|composite|fallback) \d+)*",
    r"\d+",
    r"[a-z]+ \d+( · [a-z]+ \d+)*",
    r"exact|[\d.e-]+",
    r"(\w+ \d+(, \w+ \d+)*)?",
)
"""Cells of the matrix as `octavo conform matrix` writes them."""


def ops_of(backend: str) -> list[str]:
    """The ops of the documented profile that say something of the backend; everything does of a GPU that isn't here."""
    if backend in INTERPRETED:
        return [c.op for c in suite.select("tiny")]
    facts = conform(Settings(backend=backend, only="rms_norm/float32-5x64", in_process=True)).run.capabilities
    return [c.op for c in suite.select("core") if c.requires(facts) is None]


@pytest.mark.parametrize("backend", DOCUMENTED)
def test_the_documented_matrix_is_of_the_form_that_is_written_and_has_every_op(backend: str) -> None:
    text = (ROOT / "docs/conformance.md").read_text()
    title, blank, header, rule, *rows = (
        text.partition(f"{matrix.begin(backend)}\n")[2].partition(f"\n{matrix.END}")[0].split("\n")
    )
    report = f"build/conform-{backend}.json"
    stale = f"stale: `make conform BACKEND={backend}`, then octavo conform matrix {report} docs/conformance.md"
    assert re.fullmatch(TITLE, title), stale
    assert (blank, header, rule) == ("", matrix.HEADER, re.sub(r"[^|]+", "---", matrix.HEADER)), stale
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]
    assert all(re.fullmatch(form, cell) for row in cells for form, cell in zip(ROW, row, strict=True)), stale
    assert [row[0].strip("`") for row in cells] == list(dict.fromkeys(ops_of(backend))), stale


def test_every_matrix_in_the_documentation_is_tested() -> None:
    text = (ROOT / "docs/conformance.md").read_text()
    assert tuple(re.findall(matrix.begin(r"(\w+)"), text)) == DOCUMENTED


def test_a_hash_changes_with_a_profile_s_cases_and_not_with_their_order() -> None:
    cases = list(suite.families().values())
    core = suite.PROFILES["core"]
    assert must_pass_hash(core, cases) == must_pass_hash(core, cases[::-1])
    assert must_pass_hash(core, cases) != must_pass_hash(core, cases[1:])


def plug_in_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gaps: str | None) -> BackendInfo:
    package = tmp_path / "acme_for_gaps"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "device.py").write_text("raise RuntimeError('the backend must not be imported for its gaps')\n")
    if gaps is not None:
        (package / "gaps.toml").write_text(gaps)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "acme_for_gaps", raising=False)
    where = "acme_for_gaps.device"
    return BackendInfo(name="acme", api_version=1, distribution="acme", probe=f"{where}:p", factory=f"{where}:f")


def test_gaps_are_read_from_the_backend_s_own_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = '[[gap]]\ncase = "rms_norm/float32-5x64"\nkind = "notyet"\nreason = "wrong"\n'
    info = plug_in_with(tmp_path, monkeypatch, text)
    assert set(load_gaps(info, suite.families().values())) == {"rms_norm/float32-5x64"}


def test_a_gap_that_names_no_case_is_an_error_that_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = plug_in_with(tmp_path, monkeypatch, '[[gap]]\ncase = "no/such"\nkind = "never"\nreason = "r"\n')
    with pytest.raises(ConfigError, match=r"gaps.toml of acme_for_gaps: case 'no/such' is none of the suite"):
        load_gaps(info, suite.families().values())


def test_a_backend_without_the_file_has_no_gaps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_gaps(plug_in_with(tmp_path, monkeypatch, None), suite.families().values()) == {}
