"""Reads what a program imports, without running any of it.

Follows the program's own modules (those beside it), not installed packages, and stays within
bounds of files and bytes, so that it costs a few milliseconds.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from phalanx.process.preload import PACKAGES, TRAINERS
from phalanx.process.program import Program

MAX_FILES = 60
MAX_BYTES = 2 * 1024 * 1024  # of all files together


class ScanProblem(NamedTuple):
    """Why a program cannot run as it is: ``kind`` is missing, unreadable or syntax."""

    kind: str
    file: str
    text: str
    line: int | None = None

    def __str__(self) -> str:
        where = self.file if self.line is None else f"{self.file}, line {self.line}"
        return f"{where}: {self.text}"


class Setting(NamedTuple):
    """An environment variable that the program sets.

    ``value`` is None when it cannot be read off (computed or conditional); ``default`` when it
    gives way to one that is there; ``line`` is the line of the main file that has it done.
    """

    name: str
    value: str | None
    default: bool
    line: int
    where: str


class ImportScan(NamedTuple):
    """What a program imports, wherever it does so, but for ``if TYPE_CHECKING``.

    ``imports`` are top-level names and ``dotted`` the modules, of the program and of its own
    modules; ``direct`` what the main file imports when it is loaded, in order, and ``certain``
    those of them that it imports in any case (no ``if`` or ``try`` around); ``lines`` the
    line of the main file that first imports a top-level name; ``local`` the top-level names
    that are the program's own; ``files`` those that were read, the main file first;
    ``uses_optimizer``: it steps an optimizer, or wraps a model, which costs the same;
    ``complete`` false when a bound was reached; ``first_path`` what the program will have
    first on ``sys.path``.
    """

    main: str | None = None
    first_path: str | None = None
    imports: frozenset[str] = frozenset()
    dotted: frozenset[str] = frozenset()
    direct: tuple[str, ...] = ()
    certain: tuple[str, ...] = ()
    lines: Mapping[str, int] = {}
    local: frozenset[str] = frozenset()
    uses_optimizer: bool = False
    changes_path: bool = False
    settings: tuple[Setting, ...] = ()
    problem: ScanProblem | None = None
    files: tuple[str, ...] = ()
    complete: bool = True


def scan(program: Program, cwd: str | None = None) -> ImportScan:
    """Say what ``program`` imports when run in ``cwd`` (None: here).

    Never raises for what it reads: a script that is missing, unreadable or no Python is the
    result's ``problem``. A program that is not Python has an empty result.
    """
    if not program.warmable:
        return ImportScan()
    try:
        base = os.path.abspath(cwd or os.getcwd())
    except OSError as error:  # it was removed
        name = program.module or program.script or ""
        if not os.path.isabs(name):
            why = f"the current directory cannot be read: {error.strerror}"
            return ImportScan(problem=ScanProblem("missing", name, why))
        base = os.path.dirname(name)
    if program.module is not None:
        first = base
        main = find_module(program.module, [base, *sys.path])
        if main is None:
            problem = ScanProblem("missing", program.module, "there is no module of this name")
            return ImportScan(first_path=first, problem=problem)
        return _Reader(first, _package_root(main, program.module), program.module).read(main)
    assert program.script is not None
    path = os.path.join(base, program.script)
    if os.path.isdir(path):
        main = os.path.join(path, "__main__.py")
        return _Reader(path, path, "__main__").read(main)
    first = os.path.dirname(os.path.realpath(path))
    return _Reader(first, first, "__main__").read(path)


def find_module(name: str, path: Sequence[str]) -> str | None:
    """The file that ``python -m name`` would run, found without importing a package."""
    parts = name.split(".")
    for directory in path:
        found = _file_of(os.path.join(directory or os.curdir, *parts), main=True)
        if found is not None:
            return found
    return _installed(parts)


def _installed(parts: Sequence[str]) -> str | None:
    # Editable installs are known to finders of their own, not to sys.path.
    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None)
        try:
            spec = find_spec(parts[0], None) if find_spec is not None else None
        except Exception:
            continue
        if spec is None:
            continue
        for place in spec.submodule_search_locations or ():
            found = _file_of(os.path.join(place, *parts[1:]), main=True)
            if found is not None:
                return found
        if len(parts) == 1 and spec.origin and spec.origin.endswith(".py"):
            return str(spec.origin)
    return None


def _file_of(stem: str, main: bool = False) -> str | None:
    package = os.path.join(stem, "__main__.py" if main else "__init__.py")
    if os.path.isfile(package):
        return package
    return stem + ".py" if os.path.isfile(stem + ".py") else None


def _package_root(file: str, module: str) -> str:
    """The directory in which the first part of ``module`` lies."""
    root = os.path.dirname(file)
    depth = module.count(".") + (os.path.basename(file) == "__main__.py")
    for _ in range(depth):
        root = os.path.dirname(root)
    return root


# ---------------------------------------------------------------------------------------
# One program
# ---------------------------------------------------------------------------------------


class _Reader:
    def __init__(self, first: str, root: str, module: str) -> None:
        self.first = first
        # Where the program's own modules are looked for.
        self.roots = list(dict.fromkeys((first, root)))
        # An installed program: its own package only, not all of site-packages; and that not
        # if it is one of the large ones.
        top = module.partition(".")[0]
        self.only = top if root != first and top not in PACKAGES else None
        if root != first and self.only is None:
            self.roots = [first]
        self.module = module
        self.imports: set[str] = set()
        self.dotted: set[str] = set()
        self.local: set[str] = set()
        self.files: list[str] = []
        self.bytes = 0
        self.complete = True
        self.optim = False
        self.changes_path = False
        self.settings: list[Setting] = []
        self.seen: set[str] = set()

    def read(self, main: str) -> ImportScan:
        text, problem = self._load(main)
        if text is None:
            return ImportScan(main=main, first_path=self.first, problem=problem)
        try:
            found = list(careful(ast.parse(text, main)))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            why = getattr(error, "msg", None) or str(error) or type(error).__name__
            problem = ScanProblem("syntax", main, why, getattr(error, "lineno", None))
            found = list(quick(text))
        package = self.module.rpartition(".")[0]
        if os.path.basename(main) == "__main__.py" and self.module != "__main__":
            package = self.module
        lines: dict[str, int] = {}
        for item in found:
            name = _absolute(item.name, package)
            if name is not None:
                lines.setdefault(name.partition(".")[0], item.line)
        self._look(text, main, None)
        for item in found:
            self._take(item, package, item.line)
        return ImportScan(
            main=main,
            first_path=self.first,
            imports=frozenset(self.imports),
            dotted=frozenset(self.dotted),
            direct=_distinct(i.name for i in found if i.at_load and i.name in self.dotted),
            certain=_distinct(i.name for i in found if i.certain and i.name in self.dotted),
            lines=lines,
            local=frozenset(self.local),
            uses_optimizer=self.optim or bool(self.imports & TRAINERS - self.local),
            changes_path=self.changes_path,
            settings=tuple(self.settings),
            problem=problem,
            files=tuple(self.files),
            complete=self.complete,
        )

    def _load(self, path: str) -> tuple[bytes | None, ScanProblem | None]:
        try:
            with open(path, "rb") as file:
                text = file.read(MAX_BYTES + 1)
        except FileNotFoundError:
            return None, ScanProblem("missing", path, "no such file")
        except (OSError, ValueError) as error:
            return None, ScanProblem("unreadable", path, getattr(error, "strerror", str(error)))
        self.bytes += len(text)
        if self.bytes > MAX_BYTES:
            self.complete = False
            return None, ScanProblem("unreadable", path, f"larger than {MAX_BYTES} bytes")
        self.files.append(path)
        return text, None

    def _look(self, text: bytes, file: str, line: int | None) -> None:
        """Note what a file does besides importing. ``line`` as for `Setting`; None: its own."""
        self.optim = self.optim or _OPTIM.search(text) is not None
        self.changes_path = self.changes_path or _SYS_PATH.search(text) is not None
        if b"environ" in text:
            self.settings += _settings(text, file, line)

    def _take(self, item: Import, package: str, line: int) -> None:
        """Note an import, and read on if it is a module of the program's own."""
        name = _absolute(item.name, package)
        if name is None or name in self.dotted or (item.member and name in self.seen):
            return
        self.seen.add(name)
        top = name.partition(".")[0]
        self.imports.add(top)
        if top in self.local or self._is_own(top):
            self._follow(name, top, line)
        if not item.member or _is_module(name):
            self.dotted.add(name)

    def _is_own(self, top: str) -> bool:
        if self.only == top:
            return True
        stem = os.path.join(self.first, top)
        if _file_of(stem) is not None:
            return True
        # A package without __init__.py gives way to an installed one.
        return (
            os.path.isdir(stem)
            and top not in sys.stdlib_module_names
            and not any(_file_of(os.path.join(p, top)) for p in sys.path if p != self.first)
        )

    def _follow(self, name: str, top: str, line: int) -> None:
        self.local.add(top)
        parts = name.split(".")
        for root in self.roots:
            stem = root
            for depth, part in enumerate(parts):
                stem = os.path.join(stem, part)
                file = _file_of(stem)
                if file is not None:
                    self._enter(file, ".".join(parts[: depth + 1]), line)
                elif not os.path.isdir(stem):
                    break

    def _enter(self, file: str, module: str, line: int) -> None:
        if file in self.files:
            return
        if len(self.files) >= MAX_FILES:
            self.complete = False
            return
        text, _ = self._load(file)
        if text is None:
            return
        self._look(text, file, line)
        is_package = os.path.basename(file) == "__init__.py"
        package = module if is_package else module.rpartition(".")[0]
        for item in quick(text):
            self._take(item, package, line)


def _distinct(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


def _is_module(name: str) -> bool:
    """Whether an installed package has a module of this full name, as far as files tell."""
    parts = name.split(".")
    if not parts[-1].islower():
        return False
    for directory in sys.path:
        stem = os.path.join(directory, *parts[:-1])
        if os.path.isdir(stem):
            return _file_of(os.path.join(stem, parts[-1])) is not None
    return False


def _absolute(name: str, package: str) -> str | None:
    bare = name.lstrip(".")
    level = len(name) - len(bare)
    if level == 0:
        return name or None
    parts = package.split(".") if package else []
    if level > len(parts):
        return None
    parts = parts[: len(parts) - (level - 1)]
    return ".".join([*parts, bare] if bare else parts)


# ---------------------------------------------------------------------------------------
# One file
# ---------------------------------------------------------------------------------------


class Import(NamedTuple):
    """One name imported; a relative one keeps its dots.

    ``at_load``: not inside a function; ``certain``: nor inside an ``if`` or ``try``;
    ``member``: from a module, and perhaps one itself.
    """

    name: str
    line: int
    at_load: bool
    certain: bool = False
    member: bool = False


def careful(tree: ast.Module) -> Iterator[Import]:
    """Imports by the syntax tree: for the main file."""
    yield from _statements(tree.body, at_load=True, certain=True)


def _statements(body: Iterable[ast.AST], at_load: bool, certain: bool) -> Iterator[Import]:
    for node in body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, at_load, certain)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            names = (alias.name for alias in node.names)
            yield from _from(base, names, Import("", node.lineno, at_load, certain))
        elif isinstance(node, ast.If) and _is_type_checking(node.test):
            yield from _statements(node.orelse, at_load, certain)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _statements(node.body, False, False)
        else:
            sure = certain and isinstance(node, (ast.With, ast.ClassDef))
            # Statements only: the rest of the tree is large and imports nothing.
            for name in ("body", "handlers", "cases", "orelse", "finalbody"):
                inner = getattr(node, name, None)
                if isinstance(inner, list):
                    yield from _statements(inner, at_load, sure)


def _is_type_checking(test: ast.expr) -> bool:
    return "TYPE_CHECKING" in (getattr(test, "id", ""), getattr(test, "attr", ""))


def _from(base: str, names: Iterable[str], like: Import) -> Iterator[Import]:
    if base.strip("."):
        yield like._replace(name=base)
    for name in names:
        if name != "*":
            whole = base + name if base.endswith(".") else f"{base}.{name}"
            yield like._replace(name=whole, member=True)


_REST = rb"(?:\\\n|[^\n;])+"  # of a statement
_IMPORT = re.compile(
    rb"^([ \t]*)(?:import[ \t]+(" + _REST + rb")"
    rb"|from[ \t]+([\w.]+)[ \t]+import[ \t]*(\([^)]*\)|" + _REST + rb"))",
    re.MULTILINE,
)
_TYPE_CHECKING = re.compile(
    rb"^([ \t]*)if[ \t]+(?:\w+\.)?TYPE_CHECKING[ \t]*:[^\n]*\n(?:\1[ \t]+[^\n]*\n|[ \t]*\n)*",
    re.MULTILINE,
)
# An optimizer's first step and these wrappers make torch load its compiler.
_OPTIM = re.compile(
    rb"\boptim\b|\bDistributedDataParallel\b|\bFullyShardedDataParallel\b|\bfully_shard\b"
)
_SYS_PATH = re.compile(
    rb"\bsys\.path(?:\.(?:insert|append|extend)\b|\[|[ \t]*\+?=[^=])|\baddsitedir\b"
)
_SETTING = re.compile(
    rb"^([ \t]*)(?:os\.)?environ(\[|\.setdefault\()[ \t]*['\"](\w+)['\"]"
    rb"(?:\][ \t]*=(?!=)|,)[ \t]*(?:(['\"])([^'\"\\\n{]*)\4[ \t]*\)?[ \t]*(?:#|;|$))?",
    re.MULTILINE,
)
_NAME = re.compile(r"\.*[^\W\d]\w*(?:\.[^\W\d]\w*)*")


def quick(text: bytes) -> Iterator[Import]:
    """Imports by their look: for other files, of which there may be many.

    May take an import in a string for real, which costs a needless preload at worst.
    """
    if b"TYPE_CHECKING" in text:
        text = _TYPE_CHECKING.sub(b"", text)
    for match in _IMPORT.finditer(text):
        indent, plain, base, names = (g.decode(errors="replace") for g in match.groups(b""))
        if plain:
            for name in _aliased(plain):
                if _NAME.fullmatch(name):
                    yield Import(name, 0, not indent)
        elif _NAME.fullmatch(base) or not base.strip("."):
            good = (name for name in _aliased(names) if name.isidentifier())
            yield from _from(base, good, Import("", 0, not indent))


def _aliased(names: str) -> Iterator[str]:
    for line in names.replace("\\\n", " ").splitlines():
        for part in line.partition("#")[0].strip(" ()").split(","):
            if words := part.split():
                yield words[0]


def _settings(text: bytes, file: str, line: int | None) -> Iterator[Setting]:
    for match in _SETTING.finditer(text):
        indent, how, name, quote, value = match.groups()
        own = text.count(b"\n", 0, match.start()) + 1
        # Indented: perhaps not done at all, or not before the imports.
        known = quote is not None and not indent and line is None
        yield Setting(
            name=name.decode(errors="replace"),
            value=value.decode(errors="replace") if known else None,
            default=how != b"[",
            line=own if line is None else line,
            where=f"{os.path.basename(file)}, line {own}",
        )
