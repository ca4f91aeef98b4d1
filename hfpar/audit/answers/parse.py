"""Reading an answer: from its text to a value, or to nothing where the notation isn't known."""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache

from hfpar.audit.answers import algebra
from hfpar.audit.answers.algebra import Expression, NotComputable
from hfpar.audit.answers.expressions import ExpressionReader, Unreadable
from hfpar.audit.answers.latex import (
    MAX_LENGTH,
    Token,
    clean,
    join_thousands,
    strip_words_wrapper,
    text_key,
    tokenize,
)
from hfpar.audit.answers.values import (
    BaseNumber,
    Collection,
    Labelled,
    Matrix,
    Number,
    Ratio,
    Relation,
    Sequence,
    Union,
    Value,
    Words,
    collect,
)

MAX_ITEMS = 64
_RELATIONS = {
    "=": "=", "<": "<", ">": ">", "\\lt": "<", "\\gt": ">", "\\le": "<=", "\\leq": "<=", "\\leqslant": "<=",
    "\\ge": ">=", "\\geq": ">=", "\\geqslant": ">=", "\\ne": "!=", "\\neq": "!=", "\\in": "in",
}  # fmt: skip
_MATRIX = re.compile(r"\\begin ?\{([pbB]?matrix|array)\}(?: ?\{[clr| ]*\})?((?:(?!\\begin).)*?)\\end ?\{\1\}")
_FLIPPED = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
_BASE_NAMES = {
    "two": 2,
    "three": 3,
    "four": 4,
    "five": 5,
    "six": 6,
    "seven": 7,
    "eight": 8,
    "nine": 9,
    "ten": 10,
}
_SCALES = {
    "dozen": 12,
    "hundred": 100,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
_PLAIN = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")
_BASE = re.compile(
    r"(?:\\text\{)?([0-9A-Z ]+)\}?\s*(?:_\s*\{?|\(?\s*(?:in )?(?=(?:\\text\{ ?)?base))\s*"
    r"(?:\\text\{)?\s*(?:base)?[\s}-]*(\d{1,2}|[a-z]{3,5})\}{0,2}\)?"
)
_LABEL = re.compile(
    r"[A-Za-z](?:_\{?[A-Za-z0-9]+\}?)?|\\[a-z]+|[A-Z]{2,4}"
    r"|(?:m ?)?\\(?:angle|overline|overrightarrow|triangle) ?\{?[A-Z]+\}?"
    r"|[A-Za-z](?:\^\{?-1\}?|'{1,2})? ?\( ?[A-Za-z0-9]+(?: ?, ?[A-Za-z0-9]+)* ?\)"
    r"|\\text\{[^{}]*\}|(?![abcxyz]{2,4}(?![a-z]))[A-Za-z][a-z]{2,}(?: [a-z]+)*"
)


class Parsed:
    """An answer, read."""

    def __init__(self, text: str) -> None:
        """Read `text`.

        Args:
            text: the answer alone, in LaTeX or plain.
        """
        self.listed: Value | None = None
        """With its commas as separators, where they may also part thousands."""
        if _PLAIN.fullmatch(text) and len(text) <= MAX_LENGTH:
            self.key = text
            self.value: Value | None = Number(algebra.number(Fraction(text)), text)
            return
        cleaned = clean(text)
        self.key = text_key(cleaned)
        body = strip_words_wrapper(cleaned)
        joined = join_thousands(body)
        self.value = read(joined)
        if joined != body:
            self.listed = read(body)


@lru_cache(maxsize=4096)  # a gold answer meets many texts
def parse(text: str) -> Parsed:
    """The answer, read; a text of more than `MAX_LENGTH` characters stays a text."""
    return Parsed(text)


def read(text: str) -> Value | None:
    """The value that a cleaned text stands for; None: nothing that is known."""
    if not text or len(text) > MAX_LENGTH:
        return None
    if _PLAIN.fullmatch(text):
        return Number(algebra.number(Fraction(text)), text)
    if (based := _BASE.fullmatch(text)) and (value := _based(based[1].replace(" ", ""), based[2])):
        return value
    try:
        return _AnswerReader(text).answer()
    except (Unreadable, NotComputable, RecursionError, OverflowError):
        return None


def _based(digits: str, name: str) -> BaseNumber | None:
    base = int(name) if name.isdigit() else _BASE_NAMES.get(name, 0)
    if not 2 <= base <= 36 or not all(int(digit, 36) < base for digit in digits):
        return None
    return BaseNumber(digits.lstrip("0") or "0", base)


class _AnswerReader(ExpressionReader):
    """Lists, sets, tuples, intervals, matrices, equations and inequalities around expressions."""

    def __init__(self, text: str) -> None:
        super().__init__(text, tokenize(text))

    def answer(self) -> Value:
        value = self._list()
        if self.here.kind != "end":
            raise Unreadable("something follows")
        return value

    def _list(self) -> Value:
        items = [self._statement()]
        while self._skip_separators():
            items.append(self._statement())
            if len(items) > MAX_ITEMS:
                raise Unreadable("too many items")
        return collect(self._both_signs_apart(items))

    def _both_signs_apart(self, items: list[Value]) -> list[Value]:
        return [part for item in items for part in (item.items if isinstance(item, Collection) else (item,))]

    def _skip_separators(self) -> bool:
        found = False
        while True:
            token = self.here
            is_word = token.kind == "words" and token.text.strip(" ,").lower() in ("and", "or", "")
            is_mark = token.text in (",", ";") or (
                token.kind == "command" and token.text in ("\\lor", "\\vee")
            )
            if not is_word and not is_mark:
                return found
            found = True
            self.position += 1

    def _statement(self) -> Value:
        start, tokens = self.position, self.tokens[:]  # reading cuts some in two
        self.sign, self.has_sign = 1, False
        upper = self._relation()
        if not self.has_sign:
            return upper
        end = self.position
        self.position, self.tokens, self.sign = start, tokens, -1
        lower = self._relation()
        if self.position != end:
            raise Unreadable("signs")
        self.has_sign, self.sign = False, 1
        if isinstance(upper, Labelled) and isinstance(lower, Labelled):
            return Labelled(upper.label, _signed(upper.value, lower.value))
        return _signed(upper, lower)

    # Equations and inequalities

    def _relation(self) -> Value:
        label = self._label()
        sides: list[Value] = [] if label else [self._union()]
        signs: list[str] = []
        while self.here.text in _RELATIONS and self.here.kind in ("mark", "command"):
            signs.append(_RELATIONS[self.here.text])
            self.position += 1
            if signs[-1] != "=" and self.accept("="):
                signs[-1] += "="
            sides.append(self._union())
        if label:
            return self._labelled(label, signs, sides)
        if not signs:
            return sides[0]
        return _related(signs, sides)

    def _label(self) -> str:
        """The name before a relation's sign, if a name is all that stands there."""
        for place in range(self.position, min(self.position + 12, len(self.tokens))):
            token = self.tokens[place]
            if token.kind in ("mark", "command") and token.text in _RELATIONS:
                text = self.text[self.here.start : token.start].strip()
                if self.here.kind == "words" and self.text[: self.here.start].endswith("\\text{"):
                    text = f"\\text{{{text}"
                if not _LABEL.fullmatch(text):
                    return ""
                self.position = place
                return re.sub(r"\\text|[{}\s]", "", text)
            if token.text in (",", ";"):
                return ""
        return ""

    def _labelled(self, label: str, signs: list[str], sides: list[Value]) -> Value:
        value = sides[-1]
        if set(signs) == {"="}:
            relation = None
            if len(label) == 1 and isinstance(value, Number):
                name = algebra.symbol(algebra.Atom(label))
                relation = Relation("=", algebra.add(name, algebra.negate(value.expression)))
            return Labelled(label, value, relation)
        if signs == ["in"]:
            return Labelled(label, value)
        if len(signs) == 1 and isinstance(value, Number) and signs[0] in _FLIPPED:
            return Labelled(label, _half_line(signs[0], value))
        raise Unreadable("a chain")

    # Sets and intervals

    def _union(self) -> Value:
        items = [self._element()]
        while self.here.text == "\\cup":
            self.position += 1
            items.append(self._element())
        if len(items) > 1:
            return Union(tuple(items))
        if self.here.text == ":" and isinstance(items[0], Number):
            while self.accept(":"):
                items.append(self._element())
            return Ratio(tuple(items))
        return items[0]

    def _element(self) -> Value:
        token = self.here
        if token.text == "\\{":
            self.position += 1
            if self.accept("\\}"):
                return Words("\\emptyset")
            inner = self._list()
            self.expect("\\}")
            return inner
        if token.text == "\\langle":
            return self._sequence("\\langle", ("\\rangle",))
        if token.text in ("(", "[") and self.holds_commas(self.position):
            return self._sequence(token.text, (")", "]"))
        if token.text == "\\begin":
            return self._matrix()
        if token.text in ("\\emptyset", "\\varnothing"):
            self.position += 1
            return Words("\\emptyset")
        if token.kind == "words" and token.text.strip(" ,").lower() not in ("and", "or", ""):
            return self._words()
        start = token.start
        expression = self.expression()
        end = self.tokens[self.position - 1].end
        if self.here.kind == "words":
            expression = self._scaled(expression)
        is_percent = self.units()
        return Number(expression, self.text[start:end], is_percent)

    def _scaled(self, expression: Expression) -> Expression:
        """Times a million, where that word follows."""
        word, _, rest = self.here.text.strip().partition(" ")
        if word.lower() not in _SCALES:
            return expression
        self.tokens[self.position] = Token("words", rest or "units", self.here.start, self.here.end)
        return algebra.multiply(expression, algebra.number(_SCALES[word.lower()]))

    def _words(self) -> Value:
        found = []
        while self.here.kind in ("words", "letter", "name") and self.here.text.strip().lower() not in (
            "and",
            "or",
        ):
            found.append(self.here.text.strip())
            self.position += 1
        if self.here.text in ("(", "["):
            raise Unreadable("words and brackets")
        return Words(" ".join(found).casefold())

    def _sequence(self, opening: str, closings: tuple[str, ...]) -> Value:
        self.position += 1
        sign, has_sign = self.sign, self.has_sign
        items = [self._statement()]
        while self.accept(",") or self.accept(";"):
            items.append(self._statement())
            if len(items) > MAX_ITEMS:
                raise Unreadable("too many items")
        self.sign, self.has_sign = sign, has_sign
        closing = self.here.text
        if closing not in closings:
            raise Unreadable("brackets")
        self.position += 1
        return Sequence("()" if opening == "\\langle" else opening + closing, tuple(items))

    def _matrix(self) -> Value:
        found = _MATRIX.match(self.text, self.here.start)
        if not found:
            raise Unreadable("an environment")
        rows = [row.split("&") for row in re.split(r"\\\\(?:\[[^\]]*\])?", found[2].replace("\\hline", ""))]
        if not "".join(rows[-1]).strip():
            rows.pop()
        if not rows or len({len(row) for row in rows}) != 1 or len(rows) * len(rows[0]) > MAX_ITEMS:
            raise Unreadable("rows")
        values = tuple(tuple(read(cell.strip()) for cell in row) for row in rows)
        cells = [cell for row in values for cell in row if cell is not None]
        if len(cells) != len(rows) * len(rows[0]):
            raise Unreadable("a cell")
        while self.here.kind != "end" and self.here.start < found.end():
            self.position += 1
        width = len(rows[0])
        return Matrix(tuple(tuple(cells[i : i + width]) for i in range(0, len(cells), width)))


def _signed(upper: Value, lower: Value) -> Value:
    if isinstance(upper, Number) and isinstance(lower, Number):
        if algebra.equal(upper.expression, lower.expression):
            return upper
        # Their text has both signs, so that it stands for neither.
        upper, lower = Number(upper.expression, ""), Number(lower.expression, "")
    return Collection((upper, lower))


def _related(signs: list[str], sides: list[Value]) -> Value:
    """An equation or an inequality whose first side isn't a mere name."""
    numbers = [side.expression for side in sides if isinstance(side, Number)]
    if len(signs) == 1 and signs[0] in ("=", "!=") and not numbers and len(sides) == 2:
        raise Unreadable("no expressions")
    if len(numbers) < len(sides):
        raise Unreadable("no expressions")
    if set(signs) == {"="} and all(algebra.equal(numbers[0], other) for other in numbers[1:]):
        return sides[-1]
    if len(signs) == 2 and (interval := _between(signs, sides, numbers)):
        return interval
    if len(signs) != 1 or signs[0] == "in":
        raise Unreadable("a chain")
    sign = signs[0]
    name = _variable(numbers[1])
    if name and _variable(numbers[0]) is None and sign in _FLIPPED:
        return Labelled(name, _half_line(_FLIPPED[sign], sides[0]))
    if name and sign == "=":
        relation = Relation("=", algebra.add(numbers[1], algebra.negate(numbers[0])))
        return Labelled(name, sides[0], relation)
    difference = algebra.add(numbers[0], algebra.negate(numbers[1]))
    if sign in (">", ">="):
        sign, difference = _FLIPPED[sign], algebra.negate(difference)
    return Relation(sign, difference)


def _variable(expression: Expression) -> str | None:
    if len(expression.terms) == 1 and len(expression.atoms) == 1:
        (atom,) = expression.atoms
        if atom.function is None and not atom.prime and algebra.equal(expression, algebra.symbol(atom)):
            return atom.name
    return None


_INFINITY = Number(algebra.symbol(algebra.INFINITY), "\\infty")
_MINUS_INFINITY = Number(algebra.negate(algebra.symbol(algebra.INFINITY)), "-\\infty")


def _half_line(sign: str, end: Value) -> Value:
    closed = len(sign) == 2
    if sign[0] == "<":
        return Sequence("(]" if closed else "()", (_MINUS_INFINITY, end))
    return Sequence("[)" if closed else "()", (end, _INFINITY))


def _between(signs: list[str], sides: list[Value], numbers: list[Expression]) -> Value | None:
    """The interval of `a < x <= b`."""
    name = _variable(numbers[1])
    if name is None or {sign[0] for sign in signs} not in ({"<"}, {">"}) or "!=" in signs:
        return None
    low, high = (sides[0], sides[2]) if signs[0][0] == "<" else (sides[2], sides[0])
    low_sign, high_sign = signs if signs[0][0] == "<" else signs[::-1]
    brackets = ("[" if len(low_sign) == 2 else "(") + ("]" if len(high_sign) == 2 else ")")
    return Labelled(name, Sequence(brackets, (low, high)))
