"""Every cause of the catalogue: its examples are recognised, its words are searched for."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest
import yaml

from allranks.doctor.catalogue import (
    FOLDER,
    KNOWN,
    LONG,
    Cause,
    bounded,
    fill,
    holds,
    known_findings,
    load,
    required_word,
)
from allranks.doctor.diagnose import diagnose_logs, read_logs
from allranks.doctor.failure_facts import gather
from allranks.doctor.judge import judge
from allranks.doctor.log_search import Source

CAUSES = list(load().values())
SITUATIONS = {"task", "lightning", "accelerate", "slurm"}
SITUATIONS |= {"hang", "data", "wait", "one_rank", "switched_off"}  # of rules in Python
GOLDEN = Path(__file__).with_name("golden") / "doctor.md"
HEAD = """\
# Every title of the doctor, and its fix

First with nothing known, then as the examples fill them. Made by:
ALLRANKS_GOLDEN=1 pytest -n0 tests/unit/test_doctor_causes.py -k reads_well
"""
EXAMPLES = [
    pytest.param(cause, example, id=f"{cause.slug}-{number}")
    for cause in CAUSES
    for number, example in enumerate(cause.examples)
]
# What the collected failures are scored by: these names and their meaning stay.
SLUGS = """
    backend-device-mismatch batch-shape-mismatch checkpoint-keys checkpoint-optimizer
    checkpoint-shape checkpoint-truncated checkpoint-unsafe-pickle collective-mismatch
    cuda-device-assert cuda-illegal-access cuda-in-forked-worker cuda-memory-fragmented
    cuda-out-of-memory ddp-ready-twice ddp-unused-parameters disk-full duplicate-gpu
    gradscaler-fp16-weights host-out-of-memory invalid-device job-cancelled label-out-of-range
    master-unreachable missing-file missing-module model-differs-between-ranks nan-loss
    nccl-network-unavailable no-gpu not-launched-with-launcher port-in-use rank-count-mismatch
    rank-died rank-missing-from-collective rank-raised rendezvous-timeout shared-memory-full
    slurm-bad-option slurm-node-failure slurm-pending slurm-preempted slurm-request-impossible
    slurm-requeued slurm-time-limit slurm-unreachable tensors-on-different-devices
    terminated-by-signal too-many-open-files uneven-inputs worker-killed worker-raised
    wrong-network-interface
"""


@pytest.mark.parametrize(("cause", "example"), EXAMPLES)
def test_an_example_is_recognised(cause: Cause, example: str, tmp_path: Path) -> None:
    """Read from a file, so that the fast search is part of it."""
    log = tmp_path / "job.log"
    log.write_text(f"an ordinary line\n{example}\n")
    findings = diagnose_logs([log])
    if cause.is_finding:
        assert [found.cause for found in findings][:1] == [cause.slug]
    else:
        assert cause.match(example) is not None or "\n" in example


def test_every_pattern_matches_an_example_of_its_cause() -> None:
    """A pattern that no real line is known for is a guess, and matches what it should not."""
    guesses = [
        (cause.slug, pattern.text)
        for cause in CAUSES
        for pattern in cause.patterns
        if not any(pattern.search(line) for text in cause.examples for line in text.split("\n"))
    ]
    assert not guesses


def test_every_traceback_that_is_looked_for_has_an_example(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    guesses = {(cause.slug, one) for cause in CAUSES for one in cause.raised}
    for cause in CAUSES:
        for example in cause.examples if cause.raised else ():
            log.write_text(f"{example}\n")
            raised = gather(read_logs([Source(log, log.name)])).raised
            told = [each for last in raised for each in last.chain]
            guesses -= {
                (cause.slug, one)
                for one in cause.raised
                if any(one.fits(each.text, each.frames) for each in told)
            }
    assert not guesses


def test_what_is_said_of_every_example_reads_well(tmp_path: Path) -> None:
    """The golden file is what people read: look at it whenever it changes."""
    said = "".join(said_of(cause, tmp_path / "job.log") for cause in known_findings())
    if "ALLRANKS_GOLDEN" in os.environ:
        GOLDEN.write_text(HEAD + said)
    assert HEAD + said == GOLDEN.read_text()


def said_of(cause: Cause, log: Path) -> str:
    """Titles and fixes of a cause: with nothing known, as --list has them, and of its examples."""
    titles, fixes = [cause.words({})], [cause.advice({})]
    for example in cause.examples:
        log.write_text(f"an ordinary line\n{example}\n")
        for situation in ("", *cause.fix_for):
            found = judge(gather(read_logs([Source(log, log.name)]), situations=(situation,)))[0]
            titles.append(found.title)
            fixes.append(found.fix)
    if not cause.examples:  # found by a rule in Python
        known = {name: f"<{name}>" for name in (*cause.given, *KNOWN)}
        titles.append(cause.words(known))
        fixes += [cause.advice(known, [situation]) for situation in ("", *cause.fix_for)]
    shown = [*dict.fromkeys(titles), *(f"- {fix}" for fix in dict.fromkeys(fixes))]
    return "\n".join(("", f"## {cause.slug}", *shown, ""))


def test_every_finding_has_two_examples_a_cause_and_a_fix() -> None:
    for cause in known_findings():
        is_of_lines = bool(cause.patterns)
        assert cause.cause and cause.fix and cause.title, cause.slug
        assert not cause.fix.endswith((";", ",")), f"{cause.slug}: YAML took the rest for a comment"
        assert len(cause.examples) >= 2 or not is_of_lines, cause.slug


def test_the_names_that_others_rely_on_are_there() -> None:
    assert set(SLUGS.split()) <= {cause.slug for cause in known_findings()}


def test_every_finding_is_one_of_the_catalogue() -> None:
    """So that --list is complete: what is made elsewhere may have a name that is not in it."""
    sources = {path.name: path.read_text() for path in FOLDER.parents[1].rglob("*.py")}
    made = {name for name, text in sources.items() if re.search(r"\bFinding\(", text)}
    assert made == {"catalogue.py", "judge.py"}
    assert "load()[one.slug]" in sources["judge.py"]


def test_what_a_cause_names_exists() -> None:
    known = {cause.slug for cause in CAUSES}
    for cause in CAUSES:
        assert set(cause.explains) <= known, cause.slug
        assert cause.kind in ("root", "soft", "generic", "echo", "mark"), cause.slug
        assert set(cause.fix_for) <= SITUATIONS, cause.slug
    written = "".join(path.read_text() for path in FOLDER.glob("*.yaml"))
    assert written.count("- slug: ") == len(CAUSES)  # none twice


def test_few_words_are_too_short_for_the_fast_search() -> None:
    short = {p.word for cause in CAUSES for p in cause.patterns if len(p.word) < LONG}
    assert short == {"nan", "NaN", "inf,", "inf ", "Killed"}


def test_every_pattern_compiles_and_matches_only_lines_with_its_word() -> None:
    for cause in CAUSES:
        for pattern in cause.patterns:
            re.compile(pattern.text)
            for example in cause.examples:
                if pattern.search(example):
                    assert pattern.word.lower() in example.lower(), (cause.slug, pattern)


@pytest.mark.parametrize(
    ("pattern", "word"),
    [
        (r"address already in use", "address already in use"),
        (r"port: (?P<port>\d+),.*EADDRINUSE", "EADDRINUSE"),
        (r"(?:one|two) servers? listening", " listening"),
        (r"\[enforce fail at[^\]]+\] rank", "[enforce fail at"),
        (r"work: (-?\d+)x{2}longer word", "longer word"),
    ],
)
def test_the_word_that_a_match_must_hold(pattern: str, word: str) -> None:
    assert required_word(pattern) == word


@pytest.mark.parametrize("pattern", [r"\d+ (?:error|failure)", r"this one|that one", r"[abc]+"])
def test_a_pattern_without_a_word_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="no word"):
        required_word(pattern)


def test_fields_fill_a_text_or_leave_what_stands_behind_the_bar() -> None:
    assert fill("port {port|29500} on {host|the master}", {"port": "1"}) == "port 1 on the master"


@pytest.mark.parametrize(
    ("title", "unfilled"),
    [
        ("port {prot|unknown}", "prot"),
        ("a port[: {prot}]", "prot"),
        ("a port[: {port}] of {port}", "port"),  # the second is no place: it stays as it is
    ],
)
def test_a_field_that_nothing_fills_is_refused(title: str, unfilled: str, tmp_path: Path) -> None:
    entry = {"slug": "odd", "title": title, "patterns": [r"port (?P<port>\d+) is taken"]}
    (tmp_path / "odd.yaml").write_text(yaml.safe_dump([entry]))
    with pytest.raises(ValueError, match=f"nothing fills {unfilled} in the title or fix of odd"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("fields", "truth"),
    [
        ({"unused": "4.00 GiB", "tried": "512.00 MiB"}, True),
        ({"unused": "0 bytes", "tried": "16.00 GiB"}, False),
        ({"tried": "16.00 GiB"}, False),
    ],
)
def test_sizes_are_compared(fields: dict[str, str], truth: bool) -> None:
    assert holds("unused >= tried", fields) is truth


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("a+b*", "a{1,1000}b{0,1000}"),
        (r"\+\*[\w.+*-]+?", r"\+\*[\w.+*-]{1,1000}?"),
        (r"[^\]+]*[]*]x", r"[^\]+]{0,1000}[]*]x"),
    ],
)
def test_repeats_have_an_end(text: str, same: str) -> None:
    assert bounded(text) == same
    re.compile(same)


LONG_LINES = {
    "digits": "1" * 65_000 + " requested and x written, reserved by PyTorch but unallocated",
    "a word": "a" * 65_000 + "]: segfault at 0, not responding, reserved in total by PyTorch",
    "brackets": "[PG " * 16_000 + " Watchdog caught collective operation timeout",
    # Beginnings of what a pattern looks for, again and again.
    "losses": "loss" * 16_000 + " nan inf, inf ",
    "calls of SLURM": "slurm_aSo" * 7_000 + " Socket timed out on send/recv",
    "calls of InfiniBand": "ibv_" * 16_000 + " failed with error, Got completion from peer",
    "completions": "Got completion from peer" * 2_700 + " with errors",
    "libraries": "liba.so" * 9_000 + " cannot open shared object file",
    "types": "int() argument must be x not 'NoneType'" * 1_700 + " RANC",
    "options": "sbatch: error: --" * 3_800,
    "fingerprints": "Detected mismatch between collectives on ranksTensorShape=[" * 1_100,
    "assertions": "rv != -1Cannot assign requested" * 2_100 + " Cannot assign requested address",
}


@pytest.mark.parametrize("line", LONG_LINES.values(), ids=LONG_LINES)
def test_a_very_long_line_is_read_in_no_time(line: str, tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text(f"{line}\n")
    begin = time.process_time()
    diagnose_logs([tmp_path / "job.log"])
    assert time.process_time() - begin < 2  # not the square of its length
