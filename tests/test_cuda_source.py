"""Source assembly: includes once each, line markers, and a source that changes with every file."""

from __future__ import annotations

import re
import shutil

import pytest

from cupyflash.cuda import configs, source


def tree(root, **files):
    """Files in a folder; in a name, two underscores are a slash and one before the suffix its dot."""
    for name, text in files.items():
        path = root / (name.replace("__", "/").replace("_cu", ".cu"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_includes_are_expanded_once_with_line_markers(tmp_path):
    tree(
        tmp_path,
        main_cu='#include "core/a.cuh"\n#include "core/b.cuh"\nint main_text;\n',
        core__a_cuh='#pragma once\n#include "core/b.cuh"\nint a_text;\n',
        core__b_cuh="#pragma once\nint b_text;\n",
    )
    text = source.assemble("main.cu", "constexpr int kX = 1;", root=tmp_path)
    assert text.count("b_text") == text.count("a_text") == text.count("main_text") == 1
    assert "#include" not in text
    assert "#pragma once" not in text
    assert text.index("kX") < text.index("b_text") < text.index("a_text") < text.index("main_text")
    for word, (file, line) in {
        "b_text": ("core/b.cuh", 2),
        "a_text": ("core/a.cuh", 3),
        "main_text": ("main.cu", 3),
    }.items():
        assert _place(text, word) == (file, line)


def _place(text, word):
    """(file, line) that a compiler reports for the line that holds ``word``."""
    file, number = None, 0
    for line in text.splitlines():
        if marker := re.match(r'#line (\d+) "(.*)"', line):
            number, file = int(marker[1]), marker[2]
            continue
        if word in line:
            return file, number
        number += 1
    raise AssertionError(f"{word} is not in the source")


@pytest.mark.parametrize("emulate", [False, True])
def test_only_the_branch_in_use_is_followed(tmp_path, emulate):
    tree(
        tmp_path,
        main_cu='#ifdef CUPYFLASH_EMULATE\n#include "shim.cuh"\n#else\n#include "ptx.cuh"\n#endif\n',
        shim_cuh='#include "types.cuh"\nint shim_text;\n',
        ptx_cuh='#include "types.cuh"\nint ptx_text;\n',
        types_cuh="int types_text;\n",
    )
    text = source.assemble("main.cu", "", emulate=emulate, root=tmp_path)
    assert ("shim_text" in text, "ptx_text" in text) == (emulate, not emulate)
    assert text.count("types_text") == 1


def test_errors_name_file_and_line(tmp_path):
    tree(
        tmp_path,
        main_cu='\n#include "gone.cuh"\n',
        cond_cu='#if __CUDA_ARCH__ > 800\n#include "main.cu"\n#endif\n',
    )
    with pytest.raises(FileNotFoundError, match=r"gone\.cuh, wanted by main\.cu:2"):
        source.assemble("main.cu", "", root=tmp_path)
    with pytest.raises(ValueError, match=r"cond\.cu:2: an include inside a condition"):
        source.assemble("cond.cu", "", root=tmp_path)


def test_the_source_does_not_name_the_install_path():
    for config in configs.one_per_family():
        assert str(source.kernels_root().parent) not in config.source()


def kernel_files():
    root = source.kernels_root()
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*.cu*"))


@pytest.mark.parametrize("name", kernel_files())
def test_an_edit_of_any_file_changes_a_source(tmp_path, name):
    """K14: CuPy's cache key is the source string, so a changed header must show in it."""
    copy = tmp_path / "kernels_cu"
    shutil.copytree(source.kernels_root(), copy)
    entries = sorted({config.file for config in configs.all_configs()})
    emulate = name.startswith("core/emulate/")
    before = [source.assemble(entry, "", emulate=emulate) for entry in entries]
    with open(copy / name, "a") as file:
        file.write("// an edit\n")
    after = [source.assemble(entry, "", emulate=emulate, root=copy) for entry in entries]
    assert before != after
