"""Parse path patterns, and match one path against thousands of patterns at once.

A pattern is like a line of .gitignore, with these differences:

- It starts at the workspace's root, even without a slash: `notes.md` is one path, `**/notes.md` is every depth.
- `*`, `?` and `[...]` match within one component, also hidden names. `**` is a component that matches any number of
  components, also none. `**/**` equals `**`. `**` alone matches the whole workspace with its root.
- `dir` matches that one path, of any type. `dir/**` matches everything below it. `dir/` matches both.
- Matching compares code points, without case folding or normalization. A byte that is not UTF-8 is one character.
- `!`, backslashes, `..`, `.`, empty components and a leading slash are errors.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Final, Generic, NamedTuple, TypeVar

from bonobofs.errors import PolicyError

ANY_DEPTH: Final = "**"
NAME_MAX: Final = 255
"""Maximum size of a file name in bytes on Linux. `parse` refuses a component that matches longer names only."""
DEPTH_MAX: Final = 256
"""Maximum number of components of one pattern. `**` matches deeper paths."""

_WILD: Final = frozenset("*?[")
_CONTROL: Final = re.compile("[\x00-\x1f\x7f]")
NO_CHARACTER: Final = re.compile(r"[\ud800-\udc7f\udd00-\udfff]")
"""Surrogates that no file name decodes to (`os.fsdecode` uses U+DC80 to U+DCFF for bytes that are not UTF-8)."""

_MOST_COMPARED: Final = 32
"""Maximum of literal beginnings and ends that a name is compared with before it is looked up."""
_MOST_DIRECTORIES: Final = 64
"""Maximum of directories whose matcher states are cached, and of components of each."""

Value = TypeVar("Value")


class Reach(enum.Enum):
    """The paths that a pattern covers, relative to the path of its components."""

    ONLY = "only"
    BELOW = "below"
    SUBTREE = "subtree"


class Pattern(NamedTuple):
    """A parsed pattern. `components` are literals, globs and ANY_DEPTH, which is never last nor twice in a row."""

    text: str
    components: tuple[str, ...]
    reach: Reach

    @property
    def literal(self) -> bool:
        """True if no component has a wildcard: the components name exactly one path."""
        return not any(is_wild(component) for component in self.components)

    @property
    def anywhere(self) -> str | None:
        """The literal name that the pattern matches with its subtree at any depth (`.git` for `**/.git/`), or None."""
        if len(self.components) == 2 and self.components[0] == ANY_DEPTH and self.reach is Reach.SUBTREE:
            return None if is_wild(self.components[1]) else self.components[1]
        return None


def is_wild(component: str) -> bool:
    """True if the component is not a literal name."""
    return not _WILD.isdisjoint(component)


def may_begin_with(component: str, character: str) -> bool:
    """True if the component matches a name that begins with the character."""
    first = tokens_of(component)[0]
    return not first.text or re.fullmatch(first.expression, character) is not None


def parse(text: str) -> Pattern:
    """Parse a pattern. PolicyError says which part is invalid, without file and line."""
    _refuse_foreign_syntax(text)
    components = text.split("/")
    if len(components) > DEPTH_MAX:
        raise PolicyError(f"a pattern has at most {DEPTH_MAX} components; write ** for the rest")
    reach = Reach.ONLY
    if components[-1] == "":
        components.pop()
        reach = Reach.SUBTREE
    kept: list[str] = []
    for component in components:
        _refuse_component(component)
        if component != ANY_DEPTH or kept[-1:] != [ANY_DEPTH]:
            kept.append(component)
    if kept[-1] == ANY_DEPTH:
        kept.pop()
        reach = Reach.BELOW if kept else Reach.SUBTREE
    return Pattern(text, tuple(kept), reach)


def _refuse_foreign_syntax(text: str) -> None:
    if not text:
        raise PolicyError("an empty pattern matches nothing; write ** for the whole workspace")
    if NO_CHARACTER.search(text):
        raise PolicyError("a pattern cannot hold a lone surrogate; no file name does")
    if _CONTROL.search(text):
        raise PolicyError("a pattern cannot hold control characters; write ? for one in a name")
    if "\\" in text:
        raise PolicyError("a backslash does not escape here; write [*] for a star, ? for a backslash in a name")
    if text.startswith("!"):
        raise PolicyError(
            "there are no ! patterns; what a pattern must not cover goes into [[protect]] or a role's deny"
        )
    if text.startswith("/"):
        raise PolicyError("patterns begin at the workspace's root without a slash; remove the leading one")


def _refuse_component(component: str) -> None:
    if component == "":
        raise PolicyError("an empty component (//) matches nothing")
    if component in (".", ".."):
        raise PolicyError(f"a component {component} matches nothing; write the path from the workspace's root")
    if component == ANY_DEPTH:
        return
    if ANY_DEPTH in component:
        raise PolicyError("** stands for whole components only; within a name write *")
    # Parsing into tokens takes most of the time of loading a policy, and only classes need it.
    if "[" in component:
        fewest = sum(map(_fewest_bytes, tokens_of(component)))
    else:
        fewest = len(component.encode(errors="surrogateescape")) - component.count("*")
    if fewest > NAME_MAX:
        raise PolicyError(f"a name of more than {NAME_MAX} bytes cannot exist")


def _fewest_bytes(token: Token) -> int:
    """Return the least number of bytes that the token matches."""
    return len(token.text.encode(errors="surrogateescape")) if token.literal else int(token.text != "")


class Token(NamedTuple):
    """One token of a glob. `text` is a literal character, a regular expression for one character, or "" for `*`."""

    text: str
    literal: bool
    ranges: tuple[tuple[int, int], ...] = ()
    """The code points of a class as ranges."""
    negated: bool = False
    """The token matches all code points except `ranges`. For `?`, `ranges` is empty."""

    @property
    def expression(self) -> str:
        return re.escape(self.text) if self.literal else self.text


def tokens_of(component: str) -> list[Token]:
    """Parse one component. PolicyError: a class is invalid."""
    tokens: list[Token] = []
    at = 0
    while at < len(component):
        character = component[at]
        at += 1
        if character == "*":
            tokens.append(Token("", False))
        elif character == "?":
            tokens.append(Token(".", False, negated=True))
        elif character == "[":
            end = component.find("]", at + (2 if component[at : at + 1] in ("!", "^") else 1))
            if end < 0:
                raise PolicyError("a [ without its ]; write [[] for the character itself")
            tokens.append(_class(component[at:end]))
            at = end + 1
        else:
            tokens.append(Token(character, True, ((ord(character), ord(character)),)))
    return tokens


@lru_cache(maxsize=256)  # a policy repeats a few classes in many patterns
def _class(body: str) -> Token:
    """Return the token of the text between [ and ], such as `!a-z_`."""
    if "[:" in body or "[." in body or "[=" in body:
        raise PolicyError("named classes such as [:alpha:] are not understood; write the range, for instance [a-z]")
    negated = body[0] in "!^"
    rest = body[1:] if negated else body
    ranges: list[tuple[int, int]] = []
    at = 0
    while at < len(rest):
        if rest[at + 1 : at + 2] == "-" and at + 2 < len(rest):
            if rest[at] > rest[at + 2]:
                raise PolicyError(f"the range {rest[at]}-{rest[at + 2]} is empty")
            ranges.append((ord(rest[at]), ord(rest[at + 2])))
            at += 3
        else:
            ranges.append((ord(rest[at]), ord(rest[at])))
            at += 1
    components = (re.escape(chr(low)) + (f"-{re.escape(chr(high))}" if high > low else "") for low, high in ranges)
    return Token(f"[{'^' if negated else ''}{''.join(components)}]", False, tuple(ranges), negated)


def first_match(component: str, names: Iterable[str]) -> str | None:
    """Return the first name that the component matches, or None. Compares the literal beginning and end first."""
    if not is_wild(component):
        return component if component in names else None
    tokens = tokens_of(component)
    prefix, suffix = _literal_run(tokens), _literal_run(tokens[::-1])[::-1]
    alike = [name for name in names if name.startswith(prefix) and name.endswith(suffix)]
    return next(filter(compile_name(component), alike), None) if alike else None


def compile_name(component: str) -> Callable[[str], object]:
    """Return a test for one component. Its time is linear in the length of the name for any number of stars."""
    if not is_wild(component):
        return component.__eq__
    return re.compile(_expression(component)).fullmatch


def _expression(component: str) -> str:
    chunks: list[str] = [""]
    for token in tokens_of(component):
        if token.text:
            chunks[-1] += token.expression
        else:
            chunks.append("")
    first, *others = chunks
    # A chunk has a fixed length, so its first match is as good as any. Atomic groups prevent backtracking.
    middle = "".join(f"(?>.*?{chunk})" for chunk in others[:-1])
    last = f".*{others[-1]}" if others else ""
    return f"(?s:{first}{middle}{last})"


class NameGlobs:
    """Globs for one component, compared at once. Literal beginnings and ends and the dots exclude most names early."""

    __slots__ = ("_begins", "_dots", "_ends", "_fits_beginning", "_fits_ending", "_fits_other")

    def __init__(self, components: Iterable[str]) -> None:
        begins: dict[str, str] = {}
        ends: dict[str, str] = {}
        others: dict[str, int] = {}
        for component in components:
            tokens = tokens_of(component)
            if prefix := _literal_run(tokens):
                begins[component] = prefix
            elif suffix := _literal_run(tokens[::-1])[::-1]:
                ends[component] = suffix
            else:
                others[component] = sum(token.literal and token.text == "." for token in tokens)
        self._begins = tuple(begins.values())
        self._ends = tuple(ends.values())
        self._dots = min(others.values(), default=NAME_MAX + 1)
        """Fewest dots of a name that a glob without a literal beginning or end can match."""
        self._fits_beginning = _Any(begins)
        self._fits_ending = _Any(ends)
        self._fits_other = _Any(others)

    def match(self, name: str) -> bool:
        """True if a glob matches the name."""
        return (
            (name.startswith(self._begins) and self._fits_beginning.match(name))
            or (name.endswith(self._ends) and self._fits_ending.match(name))
            or (name.count(".") >= self._dots and self._fits_other.match(name))
        )


class _Any:
    """Globs that are compiled at the first comparison: each process loads the policy, and few processes need them."""

    __slots__ = ("_components", "_fits")

    def __init__(self, components: Iterable[str]) -> None:
        self._components = tuple(components)
        self._fits: Callable[[str], re.Match[str] | None] | None = None

    def match(self, name: str) -> bool:
        if self._fits is None:
            self._fits = re.compile("|".join(map(_expression, self._components)) or "(?!)").fullmatch
        return self._fits(name) is not None


class _Globs(Generic[Value]):
    """The globs below one node, indexed by literal prefix or suffix: a thousand `svc-17-*` cost one lookup."""

    __slots__ = ("_known", "_looks", "begins", "ends")

    def __init__(self) -> None:
        self._known: dict[str, _Node[Value]] = {}
        self.begins: tuple[str, ...] = ()
        self.ends: tuple[str, ...] = ()
        """A name can match only if it has one of these prefixes or suffixes."""
        self._looks: list[tuple[slice, dict[str, list[tuple[Callable[[str], object] | None, _Node[Value]]]]]] = []

    def step(self, component: str) -> _Node[Value]:
        node = self._known.get(component)
        if node is None:
            node = self._known[component] = _Node()
            tokens = tokens_of(component)
            prefix, suffix = _literal_run(tokens), _literal_run(tokens[::-1])[::-1]
            if prefix or not suffix:
                cut, part = slice(0, len(prefix)), prefix
                self.begins = (*self.begins, part)
            else:
                cut, part = slice(-len(suffix), None), suffix
                self.ends = (*self.ends, part)
            if len(self.begins) + len(self.ends) > _MOST_COMPARED:
                self.begins, self.ends = ("",), ()
            entries = next((entries for known, entries in self._looks if known == cut), None)
            if entries is None:
                entries = {}
                self._looks.append((cut, entries))
            # `*.md` and `test_*` match every name with the literal part.
            fits = None if component in (f"*{part}", f"{part}*") else compile_name(component)
            entries.setdefault(part, []).append((fits, node))
        return node

    def nodes(self) -> Iterable[_Node[Value]]:
        return self._known.values()

    def matching(self, name: str) -> list[_Node[Value]]:
        found = []  # a comprehension is 50 % slower if nothing is found, which is the usual case
        for cut, entries in self._looks:
            for fits, node in entries.get(name[cut], ()):
                if fits is None or fits(name):
                    found.append(node)
        return found


def _literal_run(tokens: Iterable[Token]) -> str:
    run = ""
    for token in tokens:
        if not token.literal:
            break
        run += token.text
    return run


class _Node(Generic[Value]):
    """A state of the automaton. `deep` is the state after a following ANY_DEPTH, active at every depth (`loops`)."""

    __slots__ = ("below", "deep", "globs", "literal", "loops", "only", "stays", "subtree")

    def __init__(self, *, loops: bool = False) -> None:
        self.loops = loops
        self.literal: dict[str, _Node[Value]] = {}
        self.globs: _Globs[Value] | None = None
        self.deep: _Node[Value] | None = None
        self.only: list[Value] = []
        self.below: list[Value] = []
        self.subtree: list[Value] = []
        self.stays = False
        """The state has transitions or values, so `find` keeps it active. It is a flag, because a reference to itself
        is a cycle. Only the garbage collector frees cycles, and servers run without it."""

    def step(self, component: str) -> _Node[Value]:
        if component == ANY_DEPTH:
            self.deep = self.deep or _Node(loops=True)
            return self.deep
        if is_wild(component):
            self.globs = self.globs or _Globs()
            return self.globs.step(component)
        return self.literal.setdefault(component, _Node())

    def values(self) -> list[Value]:
        """Return the values of the patterns that match a path whose last component leads to this state."""
        return self.subtree + self.only if self.deep is None else self.subtree + self.only + self.deep.only

    def seal(self) -> list[_Node[Value]]:
        """Set `stays`; return the child nodes."""
        next_to = [*self.literal.values(), *(self.globs.nodes() if self.globs is not None else ())]
        self.stays = bool(next_to or self.only or self.below)
        if self.deep is not None:
            next_to.append(self.deep)
        return next_to

    def named(self, name: str) -> list[_Node[Value]]:
        """Return the states after a literal or glob that matches the name."""
        found = [self.literal[name]] if name in self.literal else []
        return found if self.globs is None else found + self.globs.matching(name)


_Walk = tuple[list[Value], list[_Node[Value]]]
"""The automaton after the components of a directory: the values of all patterns that match every path below it, and the
active states.
"""


class Matcher(Generic[Value]):
    """Patterns with a value each; `find` returns the values of all patterns that match one path.

    The time depends on the path's depth and on the number of matches, not on the number of patterns. The result can
    contain a value more than once. Several threads may call `find`.
    """

    __slots__ = ("_anywhere", "_directories", "_root", "is_empty")

    def __init__(self, patterns: Iterable[tuple[Pattern, Value]]) -> None:
        self._root: _Node[Value] = _Node()
        self._anywhere: dict[str, list[Value]] = {}
        for pattern, value in patterns:
            name = pattern.anywhere
            if name is not None:
                self._anywhere.setdefault(name, []).append(value)
                continue
            node = self._root
            for component in pattern.components:
                node = node.step(component)
            end = {Reach.ONLY: node.only, Reach.BELOW: node.below, Reach.SUBTREE: node.subtree}
            end[pattern.reach].append(value)
        pending = [self._root]
        while pending:
            pending += pending.pop().seal()
        root = self._root
        active = [each for each in (root if root.stays else None, root.deep) if each is not None]
        self._directories: dict[tuple[str, ...], _Walk[Value]] = {(): (root.subtree, active)}
        """Cache of matcher states by directory."""
        self.is_empty: Final = not (self._anywhere or active or root.subtree)

    def __bool__(self) -> bool:
        return not self.is_empty

    def find(self, components: Sequence[str]) -> list[Value]:
        """Return the values of all patterns that match a path. `components` are its components; the root has none."""
        if self.is_empty:
            return []
        directory = tuple(components[:-1])
        known = self._directories.get(directory)
        values, active = self._enter(directory) if known is None else known
        if not components:
            return values + [value for node in active for value in node.only]
        # `_step` for the last component, inlined on the hot path. It needs no states below the path.
        name = components[-1]
        found = values + self._anywhere[name] if name in self._anywhere else values[:]
        for node in active:
            if node.below:
                found += node.below
            child = node.literal.get(name)
            if child is not None:
                found += child.values()
            globs = node.globs
            if globs is not None and (name.startswith(globs.begins) or name.endswith(globs.ends)):
                for child in globs.matching(name):
                    found += child.values()
            if node.loops and node.only:
                found += node.only
        return found

    def find_below(self, components: Sequence[str]) -> list[Value]:
        """Return the values of all patterns that name the path as a directory above the paths that they match.

        The last component of the path is a literal or glob of the pattern: `conf` and `conf/a` of `conf/*/x`, and
        `b/.docker` of `**/.docker/x`. A directory that only ANY_DEPTH matches is not named. The path is not the root.
        """
        _, active = self._enter(tuple(components[:-1]))
        pending = [child for node in active for child in node.named(components[-1])]
        found = [value for node in pending for value in node.below]
        while pending:
            children = pending.pop().seal()
            found += [value for child in children for value in (*child.only, *child.below, *child.subtree)]
            pending += children
        return found

    def _enter(self, directory: tuple[str, ...]) -> _Walk[Value]:
        found, active = self._directories[()]
        found = found[:]
        for name in directory:
            active = self._step(found, active, name)
        if len(directory) <= _MOST_DIRECTORIES:
            if len(self._directories) >= _MOST_DIRECTORIES:
                self._directories = {(): self._directories[()]}
            self._directories[directory] = found, active
        return found, active

    def _step(self, found: list[Value], active: list[_Node[Value]], name: str) -> list[_Node[Value]]:
        """Add the values that a component matches to `found`. Return the active states after it."""
        found += self._anywhere.get(name, ())
        following: list[_Node[Value]] = []
        for node in active:
            if node.below:
                found += node.below
            child = node.literal.get(name)
            if child is not None:
                found += child.subtree
                if child.stays:
                    following.append(child)
                if child.deep is not None:
                    following.append(child.deep)
            if node.globs is not None:
                for child in node.globs.matching(name):
                    found += child.subtree
                    if child.stays:
                        following.append(child)
                    if child.deep is not None:
                        following.append(child.deep)
            if node.loops:
                following.append(node)
        # The state of a second ANY_DEPTH is reached from itself and from its owner. With duplicates,
        # `**/a/**/a/**/a` on a/a/a/a... would take time that grows with a power of the depth.
        return following if len(following) < 3 else list(dict.fromkeys(following))
