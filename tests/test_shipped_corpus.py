"""The text that the shipped model learns from: which installed packages may be learnt from, and what of them is."""

from email.message import Message

from helpers.scripts import EXPERIMENTS, module
from hydrajax import assets
from hydrajax.train.data.corpus import Text

shipped_corpus = module(EXPERIMENTS / "shipped_corpus.py")


def test_permissive_licences():
    permissive = ["MIT", "Apache Software License", "BSD-3-Clause AND 0BSD AND MIT AND Zlib AND CC0-1.0", "PSF-2.0"]
    others = ["MPL-2.0 AND MIT", "MIT OR AFL-2.1", "GPL-3.0-or-later", "GNU Lesser General Public License v2 (LGPLv2)"]
    others += ["Proprietary", "", "Permitted by the author"]
    assert all(map(shipped_corpus.is_permissive, permissive))
    assert not any(map(shipped_corpus.is_permissive, others))


def test_the_name_is_the_expression_or_the_classifiers_or_the_text():
    metadata = Message()
    metadata["License"] = "Copyright 2020\nMIT and so on"
    assert shipped_corpus.licence_name(metadata) == "Copyright 2020"
    metadata["Classifier"] = "License :: OSI Approved :: BSD License"
    metadata["Classifier"] = "Programming Language :: Python"
    assert shipped_corpus.licence_name(metadata) == "BSD License"
    metadata["License-Expression"] = "MIT"
    assert shipped_corpus.licence_name(metadata) == "MIT"


def test_dependencies_of_dependencies_but_not_the_package_itself():
    found = {package.name: package for package in shipped_corpus.permissive_dependencies("hydrajax")}
    assert "jax" in found
    assert "hydrajax" not in found
    assert "markdown-it-py" in found  # rich needs it, we do not
    assert any(name == "jax/__init__.py" for name in found["jax"].files)
    assert (found["jax"].folder / "jax/__init__.py").is_file()


def test_packages_of_extras():
    needed, with_tests = (shipped_corpus.needed_by("hydrajax", extras) for extras in ((), ("test",)))
    assert "pytest" in with_tests
    assert "pluggy" in with_tests  # which pytest needs
    assert "pytest" not in needed
    assert needed.keys() < with_tests.keys()


def test_held_out_files_have_their_installed_names():
    held_out = assets.about()["held_out"]
    assert "standard_library/argparse.py" in held_out
    assert shipped_corpus.installed_name("standard_library/argparse.py") == "standard_library/argparse.py"
    assert shipped_corpus.installed_name("packages/typer/typer/_display.py") in held_out


def test_near_duplicates_are_left_out():
    def file(name, numbers):
        return Text(name, "".join(f"value_{n} = {n}\n" for n in numbers))

    first, mostly_the_same, half_new = file("a", range(40)), file("b", range(5, 45)), file("c", range(25, 100))
    kept = shipped_corpus.without_near_duplicates([first, mostly_the_same, half_new, first])
    assert [one.name for one in kept] == ["a", "c"]


def test_what_is_source():
    assert shipped_corpus.is_source("pkg/b.py")
    for name in ("test_b.py", "b_test.py", "tests/deep.py", "testing/help.py", "x_pb2.py", "readme.txt"):
        assert not shipped_corpus.is_source(f"pkg/{name}")
    assert not shipped_corpus.is_source("../../../bin/tool.py")
