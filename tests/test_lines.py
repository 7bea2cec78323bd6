"""The promise, counted: how many lines of code stand behind a fine-tune.

python -m pytest tests/test_lines.py        or, to see the numbers: make lines
"""

import ast
import io
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipes" / "finetune.py"
PLAIN, ALL, RECIPE_LINES = 2310, 6590, 400
NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


def lines_of_code(path: Path) -> int:
    """Lines that hold a token which is no comment and no docstring."""
    source = path.read_text()
    docstrings = set()
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and ast.get_docstring(node) is not None
        ):
            docstrings |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NOT_CODE and token.type != tokenize.ENDMARKER:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def imported(path: Path) -> set[Path]:
    """The files of utils that a file imports at its top level, which is what the plain path needs."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.level or node.module.split(".")[0] == "utils"):
            names.add(node.module.split(".")[-1])
    return {ROOT / "utils" / f"{name}.py" for name in names}


def plain_path() -> set[Path]:
    found, new = {RECIPE}, {RECIPE}
    while new:
        new = {p for path in new for p in imported(path)} - found
        found |= new
    return found


def everything() -> set[Path]:
    return {*(ROOT / "recipes").rglob("*.py"), *(ROOT / "utils").rglob("*.py")}


def test_the_plain_path_is_at_most_2310_lines_of_code():
    assert sum(map(lines_of_code, plain_path())) <= PLAIN


def test_all_recipes_and_utils_are_at_most_6590_lines_of_code():
    assert sum(map(lines_of_code, everything())) <= ALL


def test_the_recipe_is_at_most_400_lines():
    assert len(RECIPE.read_text().splitlines()) <= RECIPE_LINES


def test_utils_import_each_other_relatively_and_never_a_recipe():
    for path in (ROOT / "utils").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and not node.level:
                assert node.module.split(".")[0] not in ("utils", "recipes", "finetune"), path
    for path in (ROOT / "recipes").glob("*.py"):
        stems = {p.stem for p in (ROOT / "recipes").glob("*.py")} - {path.stem}
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.module.split(".")[0] not in stems, path


def test_a_recipe_shadows_no_module():
    from importlib.metadata import packages_distributions

    taken = sys.stdlib_module_names | set(packages_distributions())
    assert not {p.stem for p in (ROOT / "recipes").glob("*.py")} & taken


if __name__ == "__main__":
    plain = plain_path()
    for path in sorted(everything(), key=lambda p: (p not in plain, p)):
        print(
            f"{lines_of_code(path):6}  {path.relative_to(ROOT)}",
            "" if path in plain else "(not on the plain path)",
        )
    print(f"{sum(map(lines_of_code, plain)):6}  the plain path (at most {PLAIN})")
    print(f"{sum(map(lines_of_code, everything())):6}  recipes/ and utils/ together (at most {ALL})")
