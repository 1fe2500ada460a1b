"""Imports follow one order (docs/design.md 5), and optional or slow packages are imported lazily."""

import ast
import functools
import importlib
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import hydrajax
from hydrajax import assets

PACKAGE = Path(__file__).resolve().parents[1] / "hydrajax"
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}

# The core: how a base and a draft decode. A part may import itself and the parts before it, never one after it, and no
# satellite. A module belongs to the longest matching name.
CORE = (
    "errors", "plugins", "optional_deps", "files", "locking", "assets", "processes", "compilation", "host_memory",
    "models.arrays", "ops", "models.rope_scaling", "models.expert_settings", "models.latent_settings",
    "models.recurrent_settings", "models.llama_config", "models", "sharding", "families", "trees", "drafters", "text",
    "formats", "decoding", "sequences", "refilled_batch", "generation", "conversation", "machine", "stored_trees",
    "loading", "loaded_model", "language_model", "api",
    "",  # hydrajax/__init__.py
)  # fmt: skip
# A satellite may import the core and the satellites named here.
SATELLITES = {
    "lowbit": (),
    "amphista": (),
    "lookahead": (),
    "grammar": (),
    "ssd": (),
    "integrations": ("train",),
    "bench": ("ssd", "lowbit"),
    "certify": ("bench", "grammar"),
    "train": ("bench", "lowbit"),
    "serve": ("grammar", "bench"),
    "cli": ("lowbit", "grammar", "ssd", "bench", "certify", "train", "serve"),
    "__main__": ("cli",),
    "train.__main__": ("train", "cli"),
}
PARTS = (*CORE, *SATELLITES)


def part_of(module: str) -> str:
    """Return the entry of `PARTS` for a module such as ``hydrajax.trees.static_tree``."""
    inside = module.removeprefix("hydrajax").removeprefix(".")
    fitting = [name for name in PARTS if inside == name or (name and inside.startswith(name + "."))]
    assert fitting, f"{module} is in no part: decide what it may import and add it"
    return max(fitting, key=len)


def test_the_map_shows_every_room_and_what_satellites_import():
    page = (PACKAGE.parent / "docs" / "map.md").read_text()
    core, satellites = page.split("## The core")[1].split("## The satellites")
    assert {name for name in CORE if (PACKAGE / name).is_dir() and name} <= {*re.findall(r"`(\w+)/`", core), "assets"}
    shown = {}
    for line in re.findall(r"^\| (`.*) \|$", satellites, re.M):
        rooms, _, imports = line.split(" | ") if line.count(" | ") == 2 else (*line.split(" | "), "")
        for room in re.findall(r"`(\w+)/`", rooms):
            shown[room] = tuple(filter(None, imports.strip(" |").split(", ")))
    expected = {name: imports for name, imports in SATELLITES.items() if (PACKAGE / name).is_dir()}
    assert shown | {"cli": expected["cli"]} == expected
    assert shown["cli"] == ("all",)


# The tests read every module several times.
parsed = functools.cache(ast.parse)


@functools.cache
def nodes_of(source: str) -> list[ast.AST]:
    """Return the imports and the functions of a module."""
    kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in ast.walk(parsed(source)) if isinstance(node, kinds)]


def imported_modules(module: str, source: str, is_package: bool = False) -> set[str]:
    """Return every imported module, including lazy imports."""
    found = set()
    for node in nodes_of(source):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                parents = module.split(".")[: len(module.split(".")) - node.level + is_package]
                origin = ".".join([*parents, *filter(None, [node.module])])
            # `from package import module` is an import of the module.
            inner = {f"{origin}.{name.name}" for name in node.names}
            found |= {name if name in MODULES else origin for name in inner}
    return found


def upward(module: str, source: str, is_package: bool = False) -> list[str]:
    """Return the imports of hydrajax modules that the order does not allow."""
    part = part_of(module)
    if module == "hydrajax":  # a lazy table of the public names, some of which are satellites'
        return []
    allowed = CORE[: CORE.index(part) + 1] if part in CORE else (*CORE, part, *SATELLITES[part])
    ours = {name for name in imported_modules(module, source, is_package) if name.split(".")[0] == "hydrajax"}
    return sorted(name for name in ours if part_of(name) not in allowed)


def test_no_upward_import_and_no_private_name_of_another_room():
    wrong = {}
    for module, path in MODULES.items():
        source = path.read_text()
        wrong[module] = upward(module, source, path.name == "__init__.py") + private_imports(module, source)
    assert {module: names for module, names in wrong.items() if names} == {}


def test_the_check_itself():
    for module, source, found in (
        ("models.llama", "import hydrajax.drafters.hydra", ["drafters.hydra"]),
        ("models.llama", "from hydrajax.models.cache import append", []),
        ("models.llama", "from ..drafters import hydra", ["drafters.hydra"]),
        ("models.llama", "from . import cache", []),
        ("drafters.hydra", "def f():\n    from hydrajax import api", ["api"]),
        ("drafters.hydra", "from hydrajax.decoding.engine import Params", ["decoding.engine"]),
        ("text.prompt", "from hydrajax.train.run_config import load_config", ["train.run_config"]),
        ("bench.benchmark", "from hydrajax.bench.contests.contest import contest", []),
        ("train.train_loop", "from hydrajax.cli import main", ["cli"]),
        ("train.__main__", "from hydrajax.cli.train import main", []),
        ("cli.demo", "from hydrajax.train import train_step\nfrom hydrajax import api", []),
    ):
        assert upward(f"hydrajax.{module}", source) == [f"hydrajax.{name}" for name in found]
    assert upward("hydrajax.drafters.hydra", "from hydrajax import make_decode_fn") == ["hydrajax"]
    with pytest.raises(AssertionError, match="is in no part"):
        part_of("hydrajax.newcomer.thing")
    for source in ("hub import _name", "import hub\nhub._name()", "import hub as h\nh._name()"):
        source = f"from hydrajax.formats {source}" if source.startswith("import") else f"from hydrajax.formats.{source}"
        assert private_imports("hydrajax.train.optimizer", source) == ["hydrajax.formats.hub._name"]
    for source in ("train.muon import _divided", "formats.hub import resolve"):
        assert private_imports("hydrajax.train.optimizer", f"from hydrajax.{source}") == []


def private_imports(module: str, source: str) -> list[str]:
    """Return the underscore names that a module takes from another room of the package."""
    nodes = list(ast.walk(parsed(source)))
    names = [(node.module, alias) for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names]
    modules = {alias.asname or alias.name: f"{origin}.{alias.name}" for origin, alias in names}
    taken = [(origin, alias.name) for origin, alias in names]
    taken += [
        (modules[node.value.id], node.attr)
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules
    ]
    others = [each for each in taken if each[0] in MODULES and part_of(each[0]) != part_of(module)]
    return sorted(f"{origin}.{name}" for origin, name in others if re.match("_(?!_)", name))


def test_every_imported_name_exists():
    """Also in functions, and in modules and scripts that no other quick test imports."""
    scripts = [path for folder in ("experiments", "tools") for path in (PACKAGE.parent / folder).rglob("*.py")]
    missing = [
        f"{path}: {node.module}.{alias.name}"
        for path in [*MODULES.values(), *scripts]
        for node in nodes_of(path.read_text())
        if getattr(node, "module", None) in MODULES.keys() - {"hydrajax.integrations.tunix"}  # whose library is missing
        for alias in node.names
        if f"{node.module}.{alias.name}" not in MODULES
        and not hasattr(importlib.import_module(node.module), alias.name)
    ]
    assert missing == []


def test_no_cycles():
    """Modules must not import each other in a cycle."""
    graph = {
        module: imported_modules(module, path.read_text(), path.name == "__init__.py") & set(MODULES)
        for module, path in MODULES.items()
    }
    done: set[str] = set()

    def visit(module: str, trail: list[str]):
        assert module not in trail, " -> ".join([*trail[trail.index(module) :], module])
        if module not in done:
            for other in sorted(graph[module] - {module}):
                visit(other, [*trail, module])
            done.add(module)

    for module in graph:
        visit(module, [])


def test_torch_and_transformers_are_imported_inside_functions_only():
    found = {
        (module, library, indented > "")
        for module, path in MODULES.items()
        for indented, library in re.findall(r"^( *)(?:import|from) (torch|transformers)\b", path.read_text(), re.M)
    }
    assert {module for module, library, _ in found if library == "torch"} == {"hydrajax.formats.torch_files"}
    assert {inside for _, _, inside in found} == {True}


# Optional or slow packages.
ON_DEMAND = {"torch", "transformers", "huggingface_hub", "matplotlib", "argcomplete"}
FOR_TRAINING = {"datasets", "tensorboardX", "orbax", "optax"}


def loaded_after(program: str, names: set[str]) -> set[str]:
    """Return the modules of ``names`` that a Python program has imported at its end."""
    program += f"\nimport sys; print('loaded', *({names!r} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300)
    return set(done.stdout.splitlines()[-1].split()[1:])


def test_certifying_a_server_needs_jax_for_a_local_reference_only():
    modules = [name for name in MODULES if name.startswith("hydrajax.certify.servers.")]
    modules.remove("hydrajax.certify.servers.local_reference")
    assert loaded_after(f"import {', '.join(modules)}", {"jax", "flax"} | ON_DEMAND) == set()


# Without these and the packages above, a start takes a twentieth of a second.
SLOW = {"numpy", "jax", "jaxlib", "flax", "jaxtyping", "rich", "yaml"}


def test_importing_the_package_loads_no_optional_packages():
    program = "import hydrajax.api, hydrajax.cli.train, hydrajax.cli.generate"
    assert loaded_after(program, ON_DEMAND | FOR_TRAINING) == set()


def test_a_start_without_a_command_loads_nothing_slow_and_names_at_their_first_use():
    program = "from hydrajax.cli import main\n"
    for words in ([], ["--help"], ["--version"], ["nothing"]):
        program += f"try: main({words})\nexcept SystemExit: pass\n"
    program += "import hydrajax\nassert hydrajax.__version__ and set(hydrajax.__all__) <= set(dir(hydrajax))"
    assert loaded_after(program, SLOW | ON_DEMAND | FOR_TRAINING) == set()
    assert loaded_after("import hydrajax\nhydrajax.load", {"jax", "torch"}) == {"jax"}


# Parts that the bundled base and its Hydra++ heads do not use.
UNUSED = (
    *("conversation", "stored_trees", "decoding.processors", "decoding.sampling", "decoding.typical"),
    *("drafters.corpus", "drafters.growing", "drafters.medusa", "formats.export_base", "formats.known_bases"),
    *("formats.torch_files", "formats.upload", "lowbit.int4", "models.experts", "text.templates"),
    "trees.tree_json",
)


def test_loading_a_model_imports_only_what_it_uses():
    program = 'import hydrajax\nhydrajax.load("shipped", "hydra++")'
    assert loaded_after(program, {f"hydrajax.{name}" for name in UNUSED}) == set()


def test_float_weights_need_no_module_of_low_bits():
    program = 'import hydrajax\nhydrajax.load("shipped", "none").generate("x", max_new_tokens=1)'
    assert loaded_after(program, {"hydrajax.lowbit"}) == set()


def test_every_public_name_is_there():
    """Type checkers read the imports, the program a table."""
    (typed,) = (node for node in ast.parse(MODULES["hydrajax"].read_text()).body if isinstance(node, ast.If))
    homes = {alias.name: node.module for node in typed.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert sorted(homes) == sorted(hydrajax.__all__)
    table = {name: home for home, names in hydrajax.HOMES.items() for name in names}
    assert {name: home for name, home in homes.items() if home != "hydrajax"} == table
    for name in hydrajax.__all__:
        assert getattr(hydrajax, name) is getattr(importlib.import_module(homes[name]), name)
    assert hydrajax.__version__ == version("hydrajax")
    with pytest.raises(AttributeError, match="module 'hydrajax' has no attribute 'nothing'"):
        _ = hydrajax.nothing


@pytest.mark.slow
def test_generating_loads_no_training_packages():
    """Only checkpoints in our own format need orbax. The tokenizer loads transformers, so the check can fail."""
    command = ["generate", "--base", str(assets.base()), "--prompt", "import", "--max-new-tokens", "2"]
    program = f"from hydrajax.cli import main\nassert main({command}) == 0"
    assert loaded_after(program, {"transformers", *FOR_TRAINING}) == {"transformers"}
