"""Copying a recipe and utils into one's own repository works, in three layouts, from any working folder.

python -m pytest tests/test_copying.py
"""

import re
import shutil
from importlib.util import module_from_spec, spec_from_file_location

import pytest
from launch import forked
from shell import ROOT, shell
from test_parity import write_rows
from tiny import tiny_model_folder

NOTHING = shutil.ignore_patterns("__pycache__")
OPTIONAL = (
    "data/cache",
    "data/documents",
    "data/held_out",
    "data/packing",
    "data/prompts",
    "data/questions",
    "data/rewards",
    "data/stream",
    "data/tables",
    "model/attention",
    "model/init",
    "model/lora",
    "model/quantize",
    "model/kinds",
    "plan/generation",
    "plan/search",
    "run/foreign_flags",
    "run/help",
    "train/optim_8bit",
    "train/profiling",
    "train/resume",
    "train/rollout",
    "train/trained_run",
    "train/weight_sync",
)  # what a plain run does without


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    root = tmp_path_factory.mktemp("copying")
    model, rows = (
        tiny_model_folder(root / "model", vocab_size=271),
        write_rows(root / "rows.jsonl", 4),
    )
    return f"--model {model} --dataset {rows} --steps 1 --batch_size 4"


def trains(script, flags, cwd, start=shell):
    result = start(f"python {script} {flags} --output_dir out", cwd)
    assert result.returncode == 0, result.stdout + result.stderr
    assert (cwd / "out" / "model" / "model.safetensors").exists()


@pytest.mark.slow
def test_recipes_and_utils_side_by_side_from_another_folder(tmp_path, flags):
    shutil.copytree(ROOT / "recipes", tmp_path / "mine" / "recipes", ignore=NOTHING)
    shutil.copytree(ROOT / "utils", tmp_path / "mine" / "utils", ignore=NOTHING)
    (tmp_path / "elsewhere").mkdir()
    trains(tmp_path / "mine" / "recipes" / "finetune.py", flags, tmp_path / "elsewhere")


@pytest.mark.slow
def test_a_flat_copy_beside_its_own_utils_though_the_parent_has_other_utils(tmp_path, flags):
    (tmp_path / "utils").mkdir()
    (tmp_path / "utils" / "__init__.py").write_text("raise SystemExit('the wrong utils')\n")
    flat = tmp_path / "project"
    shutil.copytree(ROOT / "utils", flat / "utils", ignore=NOTHING)
    shutil.copy(ROOT / "recipes" / "finetune.py", flat)
    trains("finetune.py", flags, flat, forked)  # flat comes before the path of the tests


def test_a_renamed_folder_and_one_sed_without_the_optional_files(tmp_path, flags):
    shutil.copytree(ROOT / "utils", tmp_path / "fsdp_utils", ignore=NOTHING)
    for name in OPTIONAL:
        (tmp_path / "fsdp_utils" / f"{name}.py").unlink()
    for table in (tmp_path / "fsdp_utils" / "run").glob("*.yaml"):
        table.unlink()
    text = (ROOT / "recipes" / "finetune.py").read_text().replace("from utils.", "from fsdp_utils.")
    (tmp_path / "train.py").write_text(text)
    (tmp_path / "utils").mkdir()  # before that on the path of the tests
    (tmp_path / "utils" / "__init__.py").write_text("raise SystemExit('the old name')\n")
    trains("train.py", flags, tmp_path, forked)


@pytest.mark.slow
def test_a_copy_without_the_tiny_model_says_so(tmp_path):
    shutil.copytree(ROOT / "utils", tmp_path / "utils", ignore=NOTHING)
    shutil.copy(ROOT / "recipes" / "finetune.py", tmp_path)
    result = forked("python finetune.py", tmp_path, apart=True)
    assert result.returncode == 2
    assert result.stderr.startswith(
        "error: recipes/tiny is not here (fix: --model FOLDER --dataset FILE)"
    )
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("package", "version", "said"),
    [
        pytest.param("torch", "{}.0a0+6.nv26.02", "torch>=", marks=pytest.mark.slow),
        ("transformers", "{}.0", "# "),
    ],
)
def test_packages_older_than_in_requirements_are_refused_with_the_remedy(
    package, version, said, tmp_path
):
    """a0+6.nv26.02: torch's versions in NVIDIA's containers. transformers: the oldest that a comment says to
    run too.
    """
    text = (ROOT / "requirements.txt").read_text()
    major, minor = re.search(rf"^{said}(\d+)\.(\d+)(,| to)", text, re.M).groups()[:2]
    # What is installed is looked for in sys.path, and the script's folder is its first entry.
    (tmp_path / "imports.py").write_text(
        f"import sys; sys.path.append({str(ROOT)!r})\nimport utils.model\n"
    )
    for found, code in ((int(minor), 0), (int(minor) - 1, 1)):
        installed = tmp_path / f"{package}-{found}.dist-info"
        installed.mkdir()
        name = f"Name: {package}\nVersion: {version.format(f'{major}.{found}')}\n"
        (installed / "METADATA").write_text(f"Metadata-Version: 2.1\n{name}")
        done = forked(f"python {tmp_path / 'imports.py'}", tmp_path, apart=True)
        assert done.returncode == code, done.stderr
        shutil.rmtree(installed)
    assert f"ImportError: {package}>={major}.{minor}" in done.stderr
    assert done.stderr.endswith("(fix: pip install -r requirements.txt)\n")


def test_gemma_2_is_refused_where_transformers_leaves_out_its_soft_cap(monkeypatch):
    for version, refused in (("5.20.2", True), ("5.21.0", False)):
        monkeypatch.setattr("transformers.__version__", version)
        spec = spec_from_file_location("utils.model.again", ROOT / "utils" / "model" / "folder.py")
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        assert ("gemma2" in sum(module.NOT_CAUSAL.values(), [])) == refused


WITHOUT = """
import sys
from importlib.abc import MetaPathFinder
sys.path[:0] = [{recipes!r}, {root!r}]

class Missing(MetaPathFinder):
    name = ""

    def find_spec(self, name, path=None, target=None):
        if name == self.name:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

missing = Missing()
sys.meta_path.insert(0, missing)
for number, missing.name in enumerate({names!r}):
    for name in [n for n in sys.modules if n.split(".")[0] in ("utils", "finetune")]:
        del sys.modules[name]
    import finetune
    finetune.main(finetune.Config(**{settings!r}, output_dir=f"{out}/{{number}}"))
"""


@pytest.mark.slow
def test_each_optional_file_can_be_left_out_alone(tmp_path, flags):
    """As in test_a_renamed_folder..., one file at a time, and all in one process."""
    model, dataset = re.findall(r"--(?:model|dataset) (\S+)", flags)
    settings = {
        "model": model,
        "dataset": dataset,
        "steps": 1,
        "batch_size": 2,
        "save_model": False,
    }
    names = [f"utils.{name.replace('/', '.')}" for name in OPTIONAL]
    code = WITHOUT.format(
        recipes=str(ROOT / "recipes"),
        root=str(ROOT),
        names=names,
        settings=settings,
        out=tmp_path / "out",
    )
    (tmp_path / "without.py").write_text(code)
    result = forked(f"python {tmp_path / 'without.py'}", tmp_path)
    assert result.returncode == 0, result.stdout
    assert result.stdout.count("finished  1 steps") == len(OPTIONAL)


@pytest.mark.parametrize(
    ("name", "needed_by"),
    [
        ("model/lora", "--lora_rank 4"),
        ("model/quantize", "--lora_rank 4 --quantization 4bit"),
        ("train/optim_8bit", "--optimizer adamw_8bit"),
        ("run/foreign_flags", "--model_name X"),
        ("plan/search", "--fit"),
        ("train/profiling", "--tensorboard"),
    ],
)
@pytest.mark.slow
def test_a_flag_that_needs_a_file_that_is_left_out_is_refused_in_one_line(
    tmp_path, flags, name, needed_by
):
    shutil.copytree(ROOT / "utils", tmp_path / "utils", ignore=NOTHING)
    (tmp_path / "utils" / f"{name}.py").unlink()
    shutil.copy(ROOT / "recipes" / "finetune.py", tmp_path)
    result = forked(f"python finetune.py {flags} {needed_by}", tmp_path, apart=True)
    assert result.returncode == 2, result.stderr
    expected = (
        "unknown flag --model_name"
        if name == "run/foreign_flags"
        else f"utils/{name}.py is not here"
    )
    assert result.stderr.startswith("error: ")
    assert expected in result.stderr
    assert result.stderr.count("\n") == 1
