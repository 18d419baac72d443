"""The planted bugs can be planted, the tests that have to find them are there, and one of them does."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.faults import mutants, planted
from tests.faults.mutants import Workshop
from tests.faults.planted import MUTANTS, Change, Misplaced

PACKAGE = mutants.ROOT / mutants.PACKAGE


@pytest.mark.parametrize("name", MUTANTS)
def test_a_bug_can_be_planted(name: str) -> None:
    """Each of its texts is there once, and what comes out is still a program."""
    sources: dict[str, str] = {}
    for change in MUTANTS[name].changes:
        source = sources.get(change.file) or (PACKAGE / change.file).read_text()
        sources[change.file] = change.applied(source)
        assert sources[change.file] != source
    for file, source in sources.items():
        compile(source, file, "exec")


@pytest.mark.parametrize("finder", sorted({mutant.finder for mutant in MUTANTS.values()}))
def test_the_tests_that_have_to_find_it_are_there(finder: str) -> None:
    file, _, test = finder.partition("::")
    functions = ast.parse((mutants.ROOT / mutants.TESTS / file).read_text()).body
    assert test in [node.name for node in functions if isinstance(node, ast.FunctionDef)]


def test_no_name_is_given_twice() -> None:
    """A second one would take the place of the first without a word."""
    tree = ast.parse(Path(planted.__file__).read_text())
    [table] = [
        node.value
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "MUTANTS"
    ]
    assert isinstance(table, ast.Dict)
    names = [ast.literal_eval(key) for key in table.keys if key is not None]
    assert len(names) == len(set(names)) == len(MUTANTS) >= 12


@pytest.mark.parametrize("text", ["nowhere", "SELECT"])
def test_a_text_that_is_missing_or_ambiguous_is_told(text: str) -> None:
    with pytest.raises(Misplaced):
        Change("sql.py", text, "").applied('ONE = """\nSELECT 1\n"""\nTWO = """\nSELECT 2\n"""\n')


def test_a_change_may_be_meant_for_one_statement() -> None:
    source = 'ONE = """\nSELECT 1\n"""\nTWO = """\nSELECT 2\n"""\n'
    changed = Change("sql.py", "SELECT", "DELETE", "TWO").applied(source)
    assert changed == 'ONE = """\nSELECT 1\n"""\nTWO = """\nDELETE 2\n"""\n'
    with pytest.raises(Misplaced):
        Change("sql.py", "SELECT", "DELETE", "THREE").applied(source)


def test_a_planted_bug_is_found(tmp_path: Path) -> None:
    [result] = Workshop(tmp_path, case="[seed1-claim, claim]").try_all(["a claim that does not lock"], jobs=1)
    assert result.how == mutants.FOUND, result
