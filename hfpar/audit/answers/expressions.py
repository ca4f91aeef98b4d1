"""Reading an expression: sums, products, fractions, powers, roots and functions, as LaTeX and plain text have them."""

from __future__ import annotations

import math
import re
from fractions import Fraction

from hfpar.audit.answers import algebra
from hfpar.audit.answers.algebra import Atom, Expression
from hfpar.audit.answers.latex import FUNCTIONS, Token

MAX_DEPTH = 30
MAX_FACTORIAL = 400
_OPENING = {"(": ")", "[": "]", "{": "}", "\\{": "\\}", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil"}
_TIMES = ("*", "\\cdot", "\\times", "\\ast")
_OVER = ("/", "\\div")
_CONSTANTS = {"\\pi": algebra.PI, "\\infty": algebra.INFINITY}
_GREEK = frozenset(
    "\\" + name
    for name in "alpha beta gamma delta epsilon varepsilon zeta eta theta kappa lambda mu nu xi rho sigma tau phi"
    " varphi chi psi omega Gamma Delta Theta Lambda Sigma Phi Psi Omega ell".split()
)


class Unreadable(ValueError):
    """Notation that isn't known."""


class ExpressionReader:
    """A recursive-descent reader over tokens; what is below commas, relations and set braces."""

    def __init__(self, text: str, tokens: list[Token]) -> None:
        """Start at the first token.

        Args:
            text: what the tokens were made from.
            tokens: an `end` last.
        """
        self.text = text
        self.tokens = tokens
        self.position = 0
        self.depth = 0
        self.num_bars = 0
        """Open absolute values."""
        self.sign = 1
        r"""What `\pm` stands for in this pass."""
        self.has_sign = False

    @property
    def here(self) -> Token:
        """The next token."""
        return self.tokens[self.position]

    def accept(self, text: str) -> bool:
        """Step over the next token if it is this."""
        if self.here.text == text and self.here.kind in ("mark", "command"):
            self.position += 1
            return True
        return False

    def expect(self, text: str) -> None:
        """Step over the next token, which must be this."""
        if not self.accept(text):
            raise Unreadable(f"no {text}")

    def holds_commas(self, place: int) -> bool:
        """Whether the brackets that open at a token hold a comma of their own."""
        depth = 0
        for token in self.tokens[place:]:
            if token.text in _OPENING or token.text == "\\langle":
                depth += 1
            elif token.text in (")", "]", "}", "\\}", "\\rfloor", "\\rceil", "\\rangle"):
                depth -= 1
                if depth == 0:
                    return False
            elif depth == 1 and token.text in (",", ";"):
                return True
        return False

    def expression(self) -> Expression:
        """A sum of products."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable("too deep")
        total = algebra.number(0)
        sign = self._sign() or 1
        while True:
            term = self._term()
            total = algebra.add(total, term if sign > 0 else algebra.negate(term))
            next_sign = self._sign()
            if next_sign is None:
                break
            sign = next_sign
        self.depth -= 1
        return total

    def _sign(self) -> int | None:
        """The signs here, multiplied; None: there are none."""
        sign = None
        while True:
            if self.accept("-"):
                sign = -(sign or 1)
            elif self.accept("+"):
                sign = sign or 1
            elif self.here.text in ("\\pm", "\\mp"):
                sign = (sign or 1) * (self.sign if self.here.text == "\\pm" else -self.sign)
                self.has_sign = True
                self.position += 1
            else:
                return sign

    def _term(self) -> Expression:
        is_integer = self._at_integer()
        result = self._factor()
        mixed_from = result if is_integer and self._wrote_integer() else None
        while True:
            if self.here.text in _TIMES and not (self.here.text == "*" and self._next_is("*")):
                self.position += 1
                sign = self._sign() or 1
                result = algebra.multiply(result, algebra.multiply(algebra.number(sign), self._factor()))
            elif self.here.text in _OVER:
                self.position += 1
                sign = self._sign() or 1
                result = algebra.divide(result, algebra.multiply(algebra.number(sign), self._factor()))
            elif self._begins_factor():
                if mixed_from is not None and (fraction := self._proper_fraction()):
                    result = algebra.add(result, fraction)
                elif self.here.kind == "number":
                    raise Unreadable("two numbers side by side")
                else:
                    result = algebra.multiply(result, self._factor())
            else:
                return result
            mixed_from = None

    def _at_integer(self) -> bool:
        return self.here.kind == "number" and self.here.text.isdigit()

    def _wrote_integer(self) -> bool:
        return self.tokens[self.position - 1].kind == "number"

    def _next_is(self, text: str) -> bool:
        return self.tokens[self.position + 1].text == text if self.here.kind != "end" else False

    def _begins_factor(self) -> bool:
        token = self.here
        if token.kind in ("number", "letter", "name"):
            return True
        if token.kind == "mark":
            return token.text in ("(", "[", "{") or (token.text == "|" and not self.num_bars)
        return token.kind == "command" and (
            token.text in _CONSTANTS
            or token.text in _GREEK
            or token.text[1:] in FUNCTIONS
            or token.text
            in ("\\frac", "\\sqrt", "\\binom", "\\lfloor", "\\lceil", "\\lvert", "\\overline", "\\log")
        )

    def _proper_fraction(self) -> Expression | None:
        r"""The fraction of a mixed number: `\frac{4}{5}` or `4/5` just after an integer."""
        found = re.compile(
            r"\\frac ?(?:\{ ?(\d+) ?\}|(\d)) ?(?:\{ ?(\d+) ?\}|(\d))(?![\d^!])|(\d+) ?/ ?(\d+)(?![\d.^!])"
        ).match(self.text, self.here.start)
        if not found:
            return None
        above, below = (int(group) for group in found.groups() if group)
        if not 0 < above < below:
            return None
        while self.here.kind != "end" and self.here.start < found.end():
            self.position += 1
        return algebra.number(Fraction(above, below))

    def _factor(self) -> Expression:
        base = self._primary()
        while True:
            if self.accept("!"):
                base = _factorial(base)
            elif self.accept("^") or (self.here.text == "*" and self._next_is("*") and self._step(2)):
                return algebra.power(base, self._exponent())
            else:
                return base

    def _step(self, count: int) -> bool:
        self.position += count
        return True

    def _exponent(self) -> Expression:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable("too deep")
        sign = self._sign() or 1
        value = self._primary()
        if self.accept("!"):
            value = _factorial(value)
        if self.accept("^"):
            value = algebra.power(value, self._exponent())
        self.depth -= 1
        return value if sign > 0 else algebra.negate(value)

    def _primary(self) -> Expression:
        token = self.here
        self.position += 1
        if token.kind == "number":
            return self._number(token)
        if token.kind in ("letter", "name"):
            return self._variable(token.text)
        if token.kind == "mark" and token.text in ("(", "[", "{"):
            if token.text != "{" and self.holds_commas(self.position - 1):
                raise Unreadable("a tuple within an expression")
            bars, self.num_bars = self.num_bars, 0
            inner = self.expression()
            self.num_bars = bars
            self.expect(_OPENING[token.text])
            return inner
        if token.kind == "mark" and token.text == "|":
            return self._absolute("|")
        if token.kind == "command":
            return self._command(token.text)
        raise Unreadable(token.text or "the end")

    def _number(self, token: Token) -> Expression:
        if len(token.text) > 400:
            raise Unreadable("too long")
        if found := re.compile(r"(\d*\.\d*?)\s*\\overline ?\{ ?(\d{1,30}) ?\}").match(self.text, token.start):
            while self.here.kind != "end" and self.here.start < found.end():
                self.position += 1
            return algebra.number(_repeating(found[1], found[2]))
        if re.search("[eE]", token.text) and abs(int(re.split("[eE]", token.text)[1])) > 400:
            raise Unreadable("too large")
        return algebra.number(Fraction(token.text))

    def _variable(self, name: str) -> Expression:
        if self.here.text == "_":
            found = re.compile(r"_ ?(?:\{([^{}]{1,12})\}|(\w))").match(self.text, self.here.start)
            if not found:
                raise Unreadable("a subscript")
            while self.here.kind != "end" and self.here.start < found.end():
                self.position += 1
            name = f"{name}_{(found[1] or found[2]).strip()}"
        if self.here.text == "'":
            raise Unreadable("a derivative")
        return algebra.symbol(Atom(name))

    def _command(self, name: str) -> Expression:
        if name in _CONSTANTS:
            return algebra.symbol(_CONSTANTS[name])
        if name in _GREEK:
            return self._variable(name)
        if name == "\\frac":
            above = self._argument()
            return algebra.divide(above, self._argument())
        if name == "\\sqrt":
            return self._root()
        if name == "\\binom":
            return _binomial(self._argument(), self._argument())
        if name in ("\\lfloor", "\\lceil"):
            inner = self.expression()
            self.expect(_OPENING[name])
            return _rounded(name[2:], inner)
        if name in ("\\lvert", "\\vert"):
            return self._absolute("\\rvert" if name == "\\lvert" else "\\vert")
        if name == "\\overline":
            found = re.compile(r"\{ ?([A-Z]{1,4}) ?\}").match(self.text, self.here.start)
            if found:
                while self.here.kind != "end" and self.here.start < found.end():
                    self.position += 1
                return algebra.symbol(Atom(f"overline {found[1]}"))
        if name[1:] in FUNCTIONS:
            return self._function(name[1:])
        raise Unreadable(name)

    def _argument(self) -> Expression:
        r"""What `\frac` takes: a group, or one character (`\frac12`, `\frac 34`)."""
        token = self.here
        if token.kind == "number" and len(token.text) > 1 and token.text.isdigit():
            self.tokens[self.position] = Token("number", token.text[1:], token.start + 1, token.end)
            return algebra.number(int(token.text[0]))
        if token.kind in ("mark", "command", "letter", "number"):
            return self._primary()
        raise Unreadable("no argument")

    def _root(self) -> Expression:
        index = Fraction(2)
        if self.here.text == "[":
            self.position += 1
            degree = self.expression().rational
            self.expect("]")
            if degree is None or degree.denominator != 1 or not 2 <= degree <= 100:
                raise Unreadable("a root's degree")
            index = degree
        return algebra.power(self._primary(), algebra.number(1 / index))

    def _absolute(self, closing: str) -> Expression:
        self.num_bars += 1
        inner = self.expression()
        self.num_bars -= 1
        self.expect(closing)
        value = inner.rational
        return algebra.number(abs(value)) if value is not None else algebra.call("abs", inner)

    def _function(self, name: str) -> Expression:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable("too deep")
        exponent = base = None
        while self.here.text in ("^", "_") and self.here.kind == "mark":
            self.position += 1
            if self.tokens[self.position - 1].text == "^":
                exponent = self._exponent()
            else:
                base = self._primary()
        if self.here.text in ("(", "["):
            argument = self._primary()
        else:
            argument = self._factor()
            while (
                self._begins_factor()
                and self.here.text[1:] not in FUNCTIONS
                and self.here.text not in ("(", "[")
            ):
                argument = algebra.multiply(argument, self._factor())
        self.depth -= 1
        if exponent is not None and exponent.rational == -1:
            name, exponent = f"arc{name}", None
        if name == "exp":
            return algebra.power(algebra.symbol(algebra.E), argument)
        value = algebra.call(name, argument) if base is None else algebra.call(name, argument, base)
        return value if exponent is None else algebra.power(value, exponent)

    def units(self) -> bool:
        """Step over a unit, a degree or a percent sign after a value, and say whether it was the latter."""
        if self.accept("\\%") or self.accept("%"):
            return True
        if self.here.kind != "words" or self.here.text.strip(" ,").lower() in ("and", "or", ""):
            return False
        is_percent = self.here.text.strip().lower() in ("percent", "per cent", "%")
        while True:
            token = self.here
            if token.kind == "words" and token.text.strip(" ,").lower() in ("and", "or"):
                return is_percent
            if token.text == "^":
                self.position += 1
                self._exponent()
            elif token.kind in ("words", "name", "letter") or token.text in ("/", "\\cdot"):
                self.position += 1
            else:
                return is_percent


def _factorial(value: Expression) -> Expression:
    number = value.rational
    if number is None:
        return algebra.call("factorial", value)
    if number.denominator != 1 or not 0 <= number <= MAX_FACTORIAL:
        raise Unreadable("a factorial")
    return algebra.number(math.factorial(int(number)))


def _binomial(above: Expression, below: Expression) -> Expression:
    if above.rational is None or below.rational is None:
        return algebra.call("binomial", above, below)
    if any(value.denominator != 1 or not 0 <= value <= 1000 for value in (above.rational, below.rational)):
        raise Unreadable("a binomial")
    return algebra.number(math.comb(int(above.rational), int(below.rational)))


def _rounded(name: str, value: Expression) -> Expression:
    number = value.rational
    if number is None:
        return algebra.call(name, value)
    return algebra.number(math.floor(number) if name == "floor" else math.ceil(number))


def _repeating(start: str, period: str) -> Fraction:
    places = len(start.partition(".")[2])
    return Fraction(start + "0") + Fraction(int(period), 10**places * (10 ** len(period) - 1))
