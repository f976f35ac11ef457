"""A calculator for integers and decimal numbers.

Needs: nothing beyond Python's standard library.

Protects against: code (the expression is parsed into a syntax tree and only numbers and + - * / // % ** are computed:
no names, calls, attributes or strings, and no `eval`), and expressions made to hang or to fill the memory, like
`9**9**9`: the length and the size of every number are checked before an operation is computed.

Does not protect against: rounding. Decimals, not integers, are 64-bit floats shown to 12 digits (15 from 10**9 on).

>>> calculator("(48 + 24) * 2 / 3"), calculator("0.1 + 0.2"), calculator("2 ** 100")
('48', '0.3', '1267650600228229401496703205376')

Errors: every expression that cannot be computed raises `ValueError` (`ZeroDivisionError` for a division by zero,
`TypeError` for an expression that is not a string) with a message for the model.
"""

import ast
import math
import operator

MAX_EXPRESSION_CHARS = 500  # so the syntax tree has at most as many levels, which are evaluated by recursion
MAX_INT_BITS = 1024  # about 308 digits, the range of a float
DIGITS = 12  # significant digits, of a float's 15 to 17: hides 0.1 + 0.2 = 0.30000000000000004
DIGITS_LARGE = 15  # from 10**9 on, where 12 digits would round amounts of money

ALLOWED = "only numbers, + - * / // % ** and parentheses are allowed"
TOO_LARGE = "number too large: at most about 300 digits are allowed"

BINARY_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
UNARY_OPERATORS = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def calculator(expression: str) -> str:
    """Compute the value of an arithmetic expression.

    Args:
        expression: Numbers combined with + - * / // % ** and parentheses, for example (48 + 24) * 2 / 3

    Returns:
        The value of the expression.
    """
    return _format(_evaluate(_parse(expression)))


def _parse(expression: str) -> ast.expr:
    """Parse the expression. Raises unless it is short enough to be evaluated by recursion."""
    if not isinstance(expression, str):
        raise TypeError(f"expression must be a string, got {type(expression).__name__}")
    expression = expression.strip()
    if not expression:
        raise ValueError("empty expression: pass a calculation such as 2 * (3 + 4)")
    if len(expression) > MAX_EXPRESSION_CHARS:
        raise ValueError(f"expression too long: {len(expression)} characters, at most {MAX_EXPRESSION_CHARS}")
    try:
        return ast.parse(expression, mode="eval").body
    except SyntaxError as error:
        where = f" at character {error.offset}" if error.offset else ""
        raise ValueError(f"syntax error{where}: {error.msg.split('. ')[0]}; {ALLOWED}") from None
    except (ValueError, MemoryError, RecursionError):  # null bytes, lone surrogates, a tree too deep for the parser
        raise ValueError(f"the expression cannot be read; {ALLOWED}") from None


def _evaluate(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):  # not bool, which is an int too
        return _checked(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in UNARY_OPERATORS:
        return UNARY_OPERATORS[type(node.op)](_evaluate(node.operand))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and isinstance(node.right, ast.UnaryOp):
        raise ValueError("% is the remainder of a division: write 50 / 100 for 50%")  # 50% + 20 would be 50 % (+20)
    if isinstance(node, ast.BinOp) and type(node.op) in BINARY_OPERATORS:
        left, right = _evaluate(node.left), _evaluate(node.right)
        _refuse(node.op, left, right)
        try:
            return _checked(BINARY_OPERATORS[type(node.op)](left, right))
        except ZeroDivisionError:
            raise ZeroDivisionError("division by zero") from None
        except OverflowError:
            raise ValueError(TOO_LARGE) from None
    raise ValueError(_explain(node))


def _refuse(op: ast.operator, left: float, right: float) -> None:
    """Raise, before anything is computed, if the result would be too large or not a real number."""
    if isinstance(op, ast.Pow) and left < 0 and right != int(right):
        raise ValueError("a negative number to a fractional power is not a real number")
    if isinstance(left, float) or isinstance(right, float):
        return  # a float does not grow in size
    bits = 0
    if isinstance(op, ast.Mult):
        bits = left.bit_length() + right.bit_length() - 1  # the least that the product can have
    elif isinstance(op, ast.Pow) and right > 0 and abs(left) > 1:
        bits = right * math.log2(abs(left))
    if bits > MAX_INT_BITS:
        raise ValueError(TOO_LARGE)


def _checked(value: float) -> float:
    """Return the number if it is within the limits."""
    small = math.isfinite(value) if isinstance(value, float) else value.bit_length() <= MAX_INT_BITS
    if not small:
        raise ValueError(TOO_LARGE)
    return value


def _explain(node: ast.expr) -> str:
    """Say which part of the expression cannot be computed."""
    if isinstance(node, ast.Name):
        return f"unknown name {node.id!r}: {ALLOWED}"
    if isinstance(node, ast.Call):
        return f"functions cannot be called: {ALLOWED}; write products with *, as in 2 * (3 + 4)"
    if isinstance(node, ast.Tuple) and node.elts:
        return "a comma is not allowed: write 1000, not 1,000"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitXor):
        return f"^ is not allowed, use ** for powers: {ALLOWED}"
    operation = type(getattr(node, "op", node)).__name__
    return f"{operation} is not allowed: {ALLOWED}"


def _format(value: float) -> str:
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:  # exact: 6 / 3 is 2
        value = int(value)
    if isinstance(value, int):
        return str(value)
    return f"{value:.{DIGITS if abs(value) < 1e9 else DIGITS_LARGE}g}"


TOOL_FUNCTIONS = [calculator]
