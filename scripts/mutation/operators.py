"""Makes mutants: one small fault each, inside functions, by the default operators of mutmut 3."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault: a piece of a module's source, given by its place in bytes, and what stands there instead."""

    module: str
    function: str
    line: int
    start: int
    end: int
    before: str
    after: str
    number: int = 1  # among those of its function that read the same

    @property
    def key(self) -> str:
        """The same after lines have moved, and short enough to read in a list of reasons."""
        number = f" (no. {self.number})" if self.number > 1 else ""
        change = f"{' '.join(self.before.split())} -> {' '.join(self.after.split())}"
        return f"{self.module}::{self.function}: {change}{number}"


SWAPS: dict[type[ast.AST], str] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "/", ast.Mod: "/", ast.Pow: "*",
    ast.LShift: ">>", ast.RShift: "<<", ast.BitAnd: "|", ast.BitOr: "&", ast.BitXor: "&",
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in", ast.And: "or", ast.Or: "and",
}  # fmt: skip
METHODS = {
    name: other
    for pair in (("lower", "upper"), ("lstrip", "rstrip"), ("find", "rfind"), ("ljust", "rjust"), ("index", "rindex"),
                 ("split", "rsplit"), ("removeprefix", "removesuffix"), ("partition", "rpartition"))
    for name, other in (pair, pair[::-1])
}  # fmt: skip


def written(node: ast.AST, **changes: object) -> str:
    """The code of a node with other fields."""
    fields = {name: getattr(node, name) for name in node._fields if hasattr(node, name)}
    return ast.unparse(ast.fix_missing_locations(type(node)(**{**fields, **changes})))


def changed(node: ast.AST) -> Iterator[str]:
    """Every way in which a piece of code is made wrong."""
    match node:
        case ast.Constant():
            yield from changed_constant(node.value)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in SWAPS:
            yield f"({ast.unparse(left)}) {SWAPS[type(op)]} ({ast.unparse(right)})"
        case ast.BoolOp(op=op, values=values):
            yield f" {SWAPS[type(op)]} ".join(f"({ast.unparse(value)})" for value in values)
        case ast.Compare():
            yield from changed_comparison(node)
        case ast.UnaryOp(op=ast.Not() | ast.Invert(), operand=operand):
            yield ast.unparse(operand)
        case ast.Call():
            yield from changed_call(node)
        case ast.Lambda(body=body):
            yield written(node, body=ast.Constant(0 if is_none(body) else None))
        case ast.Break():
            yield "return"
        case ast.Continue():
            yield "break"
        case ast.Assign(value=value) | ast.AnnAssign(value=ast.expr() as value):
            yield written(node, value=ast.Constant("" if is_none(value) else None))
        case ast.AugAssign(target=target, op=op, value=value):
            yield f"{ast.unparse(target)} = {ast.unparse(value)}"
            if type(op) in SWAPS:
                yield f"{ast.unparse(target)} {SWAPS[type(op)]}= {ast.unparse(value)}"


def is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def changed_constant(value: object) -> Iterator[str]:
    if isinstance(value, bool):
        yield repr(not value)
    elif isinstance(value, int | float):
        yield repr(value + 1)
    elif isinstance(value, str | bytes):
        mark = "XX" if isinstance(value, str) else b"XX"
        variants = (mark + value + mark, value.lower(), value.upper())  # type: ignore[operator]
        yield from (repr(variant) for variant in dict.fromkeys(variants) if variant != value)


def changed_comparison(node: ast.Compare) -> Iterator[str]:
    parts = [node.left, *node.comparators]
    for place, op in enumerate(node.ops):
        words = [SWAPS[type(op)] if i == place else ast.unparse(written_op(each)) for i, each in enumerate(node.ops)]
        yield f"({ast.unparse(parts[0])})" + "".join(
            f" {word} ({ast.unparse(part)})" for word, part in zip(words, parts[1:], strict=True)
        )


def written_op(op: ast.cmpop) -> ast.AST:
    """`ast.unparse` writes no operator by itself, so its word comes from a comparison."""
    text = ast.unparse(ast.Compare(ast.Name("a"), [op], [ast.Name("b")]))
    return ast.Name(text.removeprefix("a ").removesuffix(" b"))


def changed_call(node: ast.Call) -> Iterator[str]:
    """Arguments become None or go; methods of strings become their opposites."""
    for place, argument in enumerate(node.args):
        if not is_none(argument) and not isinstance(argument, ast.Starred):
            yield written(node, args=[ast.Constant(None) if i == place else arg for i, arg in enumerate(node.args)])
        if len(node.args) + len(node.keywords) > 1:
            yield written(node, args=[arg for i, arg in enumerate(node.args) if i != place])
    for place, keyword in enumerate(node.keywords):
        if keyword.arg is not None and not is_none(keyword.value):
            nothing = ast.keyword(keyword.arg, ast.Constant(None))
            yield written(node, keywords=[nothing if i == place else kw for i, kw in enumerate(node.keywords)])
        if len(node.args) + len(node.keywords) > 1:
            yield written(node, keywords=[kw for i, kw in enumerate(node.keywords) if i != place])
    if isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
        yield written(node, func=ast.Attribute(node.func.value, METHODS[node.func.attr]))


def mutants_of(module: str, source: str) -> Iterator[Mutant]:
    lines = source.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    content = source.encode()
    for function, node in places(ast.parse(source)):
        start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        before = content[start:end].decode()
        for after in dict.fromkeys(changed(node)):
            after = f"({after})" if isinstance(node, ast.expr) and not isinstance(node, ast.Constant) else after
            mutant = Mutant(module, function, node.lineno, start, end, before, after)
            if meaning(after) not in (None, meaning(before)):
                yield mutant


def meaning(piece: str) -> str | None:
    """Parses an expression or a simple statement; returns None if it is not Python."""
    try:
        return ast.dump(ast.parse(f"({piece})", mode="eval"))
    except SyntaxError:
        pass
    try:
        return ast.dump(ast.parse(piece))
    except SyntaxError:
        return None


def applied(content: bytes, mutant: Mutant) -> bytes:
    return content[: mutant.start] + mutant.after.encode() + content[mutant.end :]


def places(tree: ast.AST, inside: str = "") -> Iterator[tuple[str, ast.stmt | ast.expr]]:
    """Statements and expressions inside functions, but for annotations, decorators, defaults and docstrings."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            name = f"{inside}.{child.name}".lstrip(".")
            for statement in body_of(child):
                yield from (
                    below(statement, name) if isinstance(child, ast.FunctionDef) else places_in_class(statement, name)
                )


def places_in_class(statement: ast.stmt, name: str) -> Iterator[tuple[str, ast.stmt | ast.expr]]:
    return places(ast.Module([statement], []), name)


def body_of(node: ast.FunctionDef | ast.ClassDef) -> list[ast.stmt]:
    return node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body


def below(node: ast.AST, function: str) -> Iterator[tuple[str, ast.stmt | ast.expr]]:
    if isinstance(node, ast.FunctionDef):  # one inside another
        for statement in body_of(node):
            yield from below(statement, f"{function}.{node.name}")
        return
    if isinstance(node, ast.stmt | ast.expr):
        yield function, node
    skipped = {id(getattr(node, "annotation", None)), id(getattr(node, "type_params", None))}
    if isinstance(node, ast.JoinedStr):  # mostly messages, and what is put into one may not hold its quotes
        return
    for child in ast.iter_child_nodes(node):
        if id(child) not in skipped:
            yield from below(child, function)
