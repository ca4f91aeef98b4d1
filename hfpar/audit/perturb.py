"""Texts with other numbers and names in them, as natural as they were.

A model that hasn't seen a text should find its copy about as easy to guess: so numbers stay as round as they were,
equal ones stay equal, larger ones stay larger, and what a number can't be changed in (an exponent, a label, a
drawing's code, the days of a week) stays.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

from hfpar.audit.letters import find_letters, new_letters
from hfpar.audit.names import EITHER, FEMALE, MALE, NO_NAMES

_UNITS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen".split()
)
_UNITS += "sixteen seventeen eighteen nineteen".split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
_FRACTIONS = {"third": "fourth", "fourth": "fifth", "quarter": "third", "fifth": "fourth", "sixth": "fifth"}
_SEVERAL = {"two-thirds": "three-fourths", "three-fourths": "two-thirds", "three-quarters": "two-thirds"}

_PROTECTED = re.compile(
    r"\[asy\].*?(?:\[/asy\]|\Z)"
    r"|\\(?:hspace|vspace|label|ref|phantom|rule|color|includegraphics|begin|end|tag)\*?(?:\[[^\]]*\])?(?:\{[^{}]*\})+"
    r"|\\\\\[[^\]]*\]"
    r"|\d+_(?=[\d{])\d*|_\d+"  # numbers in another base, labels
    r"|\^\{?-?\d(?!\d)\}?|\^\{?-?\d+\}?\\circ|\\sqrt\[\d+\]"  # powers and roots
    r"|\b2(?= ?\\pi)|(?<=[Bb]ase )\d+|(?<=[Bb]ase-)\d+|(?<=[Bb]ase \$)\d+"
    r"|\b(?:90|180|360)(?=\$?\s*(?:\^|\\circ|°|-?\s?degree))"
    r"|\b(?:100(?=\s*(?:\\?%|percent))|7(?= days)|365(?= days)|52(?= weeks)|24(?= hours)|60(?= minutes| seconds)"
    r"|12(?= months| inches))"
    r"|\b(?:seven(?= days)|twelve(?= months| inches))"
    r"|(?<![\d.])\d+(?:\s*,\s*\d+)*(?:\s*,\s*(?:\\[lc]?dots|\.\.\.|…))"  # 1, 2, 3, ...
    r"|\d+(?:st|nd|rd|th|D)\b|(?<=\d):\d\d\b",
    re.DOTALL,
)
_LABEL = re.compile(r"_\{[^{}]*\}")
_FIRST_OF_TWO = re.compile(r"\\[dt]?(?:frac|binom)(\d)(\d)")
_NUMBER = re.compile(r"(?<![\w.\\])(?:\d{1,3}(?:(?:,|\{,\}|,\\!)\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.])\.\d+")
_AFTER_COMMAND = re.compile(r"\\(?:sqrt(\d)|(?!d?t?frac|binom|sqrt)[A-Za-z]+(\d+))")
_CLOCK = re.compile(r"\b(\d{1,2}):(\d\d)\b")
_COMPOUND = re.compile(
    r"\b(?P<tens>" + "|".join(_TENS) + r")(?:(?P<join>[- ])(?P<unit>" + "|".join(_UNITS[1:10]) + r"))?\b"
    r"|\b(?P<small>" + "|".join(sorted(_UNITS[2:], key=len, reverse=True)) + r")\b",
    re.IGNORECASE,
)
_SHARES = re.compile(
    r"(?<!first )(?<!other )(?<!second )(?<!and a )(?<!a )(?<!in )"
    r"\b(?P<half>half)(?= (?:of|as|the|that|what|his|her|their)\b)"
    r"|\b(?P<twice>twice)(?= (?:as|the|that|what|a|his|her|its|their|this)\b)"
    r"|\b(?P<one>one)(?P<dash>[- ])(?P<part>" + "|".join(_FRACTIONS) + r")\b"
    r"|\ba (?P<of>third|quarter)(?= (?:of|as|the)\b)"
    r"|\b(?:two|three|four|five)[- ](?:thirds|fourths|quarters|fifths|sixths)\b",
    re.IGNORECASE,
)
_WORD = re.compile(r"[A-Za-z]+")
_BEGINNINGS = frozenset((*_UNITS[1:], *_TENS, "half", "twice", "a"))
_CAPITALISED = re.compile(r"\b[A-Z][a-z]{1,11}\b")
_VERB = re.compile(
    r"(?:'s|’s)\b| (?:has|had|is|was|wants|buys|bought|can|will|went|gets|got|made|makes|needs|gave)\b"
)
_OPENERS = frozenset(
    "If When While After Since How Does Did Do Is Was And But Then So Before Because Both Although As For With Today "
    "Yesterday Later Suppose Assume Assuming Calculate Find Let Now Once Although Though However What At In On By From "
    "Of To That Can Could Will Would Has Her His Their Every Each Another Only Or Until Unless Where".split()
)
_SENTENCE_END = re.compile(r"(?:^|[.?!:\"“”\n]\s*|[.?!]['’\"”]\s+)$")
_KNOWN = frozenset((*FEMALE, *MALE, *EITHER))
_LATE = 0.6
"""Where nothing behind this part of a text can change, its variables do."""


@dataclass(frozen=True)
class Site:
    """A place that can change."""

    start: int
    end: int
    kind: str
    """`number`, `word` (a number's), `clock`, `share`, `name`, `letter`."""
    value: str
    """What must change in the same way everywhere."""


@dataclass(frozen=True)
class Perturbed:
    """A changed text."""

    text: str
    spans: list[tuple[int, int]]
    """`[start, end)` in characters of the original, of what was changed."""


def holds_changeable(text: str, start: int) -> bool:
    """Whether anything from `start` on could be another number or name."""
    return any(site.end > start for site in find_sites(text))


def perturb(text: str, rng: random.Random) -> Perturbed:
    """Change numbers and names, each everywhere in the same way; the text as it is where nothing can change."""
    sites = find_sites(text)
    kept = {_key(number) for number in re.findall(r"\d+", _without(text, sites))}
    numbers = _new_numbers(_number_values(sites), kept, rng)
    words = _new_names(text, [site.value for site in sites if site.kind == "name"], rng)
    letters = {site.value for site in sites if site.kind == "letter"}
    words |= new_letters(letters, {text[start] for start, _ in find_letters(text)} - letters, rng)
    parts, spans, done = [], [], 0
    for site in sites:
        old = text[site.start : site.end]
        new = _replacement(site, old, numbers, words)
        if new != old:
            parts += [text[done : site.start], new]
            spans.append((site.start, site.end))
            done = site.end
    return Perturbed("".join([*parts, text[done:]]), spans)


def _without(text: str, sites: Sequence[Site]) -> str:
    """What stays."""
    ends = [0, *(site.end for site in sites)]
    starts = [*(site.start for site in sites), len(text)]
    return " ".join(text[end:start] for end, start in zip(ends, starts, strict=True))


# Where


def find_sites(text: str) -> list[Site]:
    """All places that can change, in order, none within another."""
    protected = [match.span() for match in _PROTECTED.finditer(text)]
    taken = protected + [match.span() for match in (*_runs(text), *_LABEL.finditer(text))]
    found: list[Site] = []
    for site in _candidates(text):
        if all(site.end <= start or site.start >= end for start, end in taken):
            found.append(site)
            taken.append((site.start, site.end))
    if all(site.end <= _LATE * len(text) for site in found):
        # Letters are easily carried on from the prefix, even by a model that knows the original by heart.
        found += [
            Site(start, end, "letter", text[start])
            for start, end in find_letters(text)
            if all(end <= first or start >= last for first, last in protected)
        ]
    return sorted(found, key=lambda site: site.start)


def _candidates(text: str) -> Iterator[Site]:
    """Of those that overlap, the first one counts."""
    for match in _CLOCK.finditer(text):
        if 2 <= int(match[1]) <= 12:
            yield Site(match.start(1), match.end(1), "clock", match[1])
    for match in _FIRST_OF_TWO.finditer(text):
        for group in (1, 2):
            if int(match[group]) > 1:
                yield Site(match.start(group), match.end(group), "number", match[group])
    for pattern in (_NUMBER, _AFTER_COMMAND):
        for match in pattern.finditer(text):
            group = match.lastindex or 0
            if Decimal(_plain(match[group])) not in (0, 1):
                yield Site(*match.span(group), "number", match[group])
    # Tried at words they can begin with: several times faster than searching for them.
    words = [match.start() for match in _WORD.finditer(text) if match[0].lower() in _BEGINNINGS]
    for start in words:
        if share := _SHARES.match(text, start):
            yield Site(*share.span(), "share", share[0].lower())
    for start in words:
        if word := _COMPOUND.match(text, start):
            yield Site(*word.span(), "word", str(_word_value(word)))
    for match in _names(text):
        yield Site(*match.span(), "name", match[0])


def _runs(text: str) -> Iterator[re.Match[str]]:
    """Lists of whole numbers that follow one another: changed, they'd no longer do so."""
    for match in re.finditer(r"(?<![\d.,])\d+(?:, ?(?:and |or )?\d+){2,}(?![\d.])", text):
        values = [int(value) for value in re.findall(r"\d+", match[0])]
        if all(later - earlier == 1 for earlier, later in zip(values, values[1:], strict=False)):
            yield match


def _names(text: str) -> list[re.Match[str]]:
    words = [match for match in _CAPITALISED.finditer(text) if match[0] not in NO_NAMES]
    alone = [match for match in words if not _beside_capital(text, match)]
    inside = [
        match for match in alone if not _SENTENCE_END.search(text[max(0, match.start() - 4) : match.start()])
    ]
    names = {match[0] for match in alone if match[0] in _KNOWN}
    # A word that no list has is a name if it stands within a sentence as a person's would.
    names |= {
        match[0] for match in inside if len(match[0]) > 2 and _VERB.match(text[match.end() : match.end() + 9])
    }
    return [match for match in alone if match[0] in names]


def _beside_capital(text: str, match: re.Match[str]) -> bool:
    """Whether it's part of a longer name, as a city's or a person's with a title."""
    before, after = text[: match.start()], text[match.end() : match.end() + 2]
    if re.match(r" [A-Z]", after) or after[:1] in ("-", "_", "{", "}"):
        return True
    if before.endswith(("\\", "-", "{", "_", "$")):
        return True
    previous = re.search(r"([A-Z][a-z]*)\.? $", before[-20:])
    return previous is not None and previous[1] not in _OPENERS and not _SENTENCE_END.search(before[-4:])


# To what


def _plain(number: str) -> str:
    return re.sub(r"[,{}\\!]", "", number)


def _number_values(sites: Sequence[Site]) -> dict[str, str]:
    """Digits of each number by its value, so that `3` and `three`, `1000` and `1,000` change alike."""
    found: dict[str, str] = {}
    for site in sites:
        if site.kind in ("number", "word", "clock"):
            digits = _plain(site.value)
            found.setdefault(_key(digits), digits)
    return found


def _key(digits: str) -> str:
    return format(Decimal(digits).normalize(), "f")


def _new_numbers(values: Mapping[str, str], kept: set[str], rng: random.Random) -> dict[str, Decimal]:
    """New values by old ones: from small to large, each larger than the one before where that's possible.

    Args:
        values: Digits by value.
        kept: Values that stand where they can't change; if possible, none becomes equal to one.
        rng: Chooses.
    """
    old = sorted(values, key=Decimal)
    chosen: dict[str, Decimal] = {}
    last = Decimal("1")
    for place, key in enumerate(old):
        choices = [choice for choice in _choices(values[key]) if choice not in chosen.values()]
        choices = [choice for choice in choices if _key(str(choice)) not in kept] or choices
        ahead = len(old) - place - 1
        above = [choice for choice in choices if choice > last]
        # Not so large that the next one has no place.
        limit = Decimal(old[place + 1]) if ahead else None
        fitting = [choice for choice in above if limit is None or choice < max(limit, Decimal(key) + 1)]
        pool = fitting or above or choices
        if not pool:
            continue
        chosen[key] = rng.choice(pool)
        last = max(last, chosen[key])
    return chosen


def _choices(digits: str) -> list[Decimal]:
    """Numbers of the same form, not too far away."""
    whole, _, decimals = digits.partition(".")
    if decimals and int(whole or "0") < 2:
        return [Decimal(f"{int(whole or '0')}.{part}") for part in _near(decimals, allow_one=True)]
    if decimals:
        return [Decimal(f"{part}.{decimals}") for part in _near(whole)]
    if len(whole) == 4 and 1900 <= int(whole) <= 2099 and int(whole) % 100:
        year = int(whole)
        return [
            Decimal(near)
            for near in range(year - 9, year + 10)
            if near // 100 == year // 100 and near != year
        ]
    return [Decimal(part) for part in _near(whole)]


def _near(digits: str, allow_one: bool = False) -> list[str]:
    """Digit strings of the same length, zeros at both ends and, beyond one digit, parity and final 5."""
    core = digits.strip("0")
    if not core:
        return []
    head = len(digits) - len(digits.lstrip("0"))
    tail = len(digits) - len(digits.rstrip("0"))
    value, width = int(core), len(core)
    low, high = max(10 ** (width - 1), int(value * 0.55)), min(10**width - 1, int(value * 1.8) + 1)
    if width == 1 and not tail and not allow_one:
        low, high = 2, 9
        low, high = max(low, value - 2), min(high, value + 2)
    step = 1 if width == 1 else 10 if value % 5 == 0 else 2
    stride = max(1, (high - low) // (step * 200)) * step
    if stride > 10:
        stride -= stride % 10 - step % 10
    span = range(low + (value - low) % stride, high + 1, stride)
    near = [number for number in span if number != value and number % 10]
    return ["0" * head + str(number) + "0" * tail for number in near]


def _new_names(text: str, names: Sequence[str], rng: random.Random) -> dict[str, str]:
    """Other names of the same gender, about as long, that aren't in the text."""
    chosen: dict[str, str] = {}
    present = {match[0] for match in _CAPITALISED.finditer(text)}
    for name in dict.fromkeys(names):
        lists = [group for group in (FEMALE, MALE, EITHER) if name in group] or [EITHER]
        free = [other for other in lists[0] if other not in present and other not in chosen.values()]
        near = [other for other in free if abs(len(other) - len(name)) <= 1 and other[0] != name[0]]
        if near or free:
            chosen[name] = rng.choice(near or free)
    return chosen


def _replacement(site: Site, old: str, numbers: Mapping[str, Decimal], words: Mapping[str, str]) -> str:
    if site.kind in ("name", "letter"):
        return words.get(site.value, old)
    if site.kind == "share":
        return _like(_other_share(site.value), old)
    new = numbers.get(_key(_plain(site.value)))
    if new is None:
        return old
    if site.kind == "clock":
        return str(new) if new <= 12 else old
    if site.kind == "word":
        return _like(_words(int(new), old), old)
    return _with_separators(new, old)


def _other_share(share: str) -> str:
    if share == "half":
        return "a third"
    if share == "twice":
        return "three times"
    if share[-1] == "s":
        other = _SEVERAL.get(share.replace(" ", "-"), "three-fifths")
        other = other if other != share.replace(" ", "-") else "two-fifths"
        return other.replace("-", " ") if " " in share else other
    begin, part = share[: -len(share.split(" ")[-1].split("-")[-1])], re.split("[- ]", share)[-1]
    return begin + _FRACTIONS[part]


def _with_separators(new: Decimal, old: str) -> str:
    """Written as `old` is: decimals, separators of thousands."""
    decimals = len(old.partition(".")[2]) if "." in old else 0
    text = f"{new:.{decimals}f}"
    if old.startswith("."):
        return text.removeprefix("0")
    separator = re.search(r"(?<=\d)(,\\!|\{,\}|,)(?=\d{3})", old)
    if separator:
        whole, _, rest = text.partition(".")
        text = f"{int(whole):,}".replace(",", separator[0]) + (f".{rest}" if rest else "")
    return text


def _word_value(match: re.Match[str]) -> int:
    if match["small"]:
        return _UNITS.index(match["small"].lower())
    unit = _UNITS.index(match["unit"].lower()) if match["unit"] else 0
    return 20 + 10 * _TENS.index(match["tens"].lower()) + unit


def _words(number: int, old: str) -> str:
    if number < 20:
        return _UNITS[number]
    if number >= 100:
        return old
    tens, unit = divmod(number, 10)
    join = " " if " " in old else "-"
    return _TENS[tens - 2] + (join + _UNITS[unit] if unit else "")


def _like(new: str, old: str) -> str:
    """With a capital where `old` has one."""
    return new[0].upper() + new[1:] if old[:1].isupper() else new
