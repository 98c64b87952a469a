//! Checks of a template's syntax tree, before it is compiled.

use minijinja::machinery::ast::{BinOpKind, Call, CallArg, Expr, Macro, Stmt};
use minijinja::{Error, ErrorKind};

/// Deepest nesting; a chain of operators nests once for each.
const MAX_DEPTH: usize = 200;
/// Longest list, map, or list of arguments written out.
const MAX_ITEMS: usize = 4096;
/// Longest text that a repetition of constants may make; the compiler computes constants.
const MAX_CONSTANT_BYTES: usize = 4096;

pub(super) fn check(tree: &Stmt) -> Result<(), Error> {
    statement(tree, 0)
}

fn refused(problem: String) -> Error {
    Error::new(ErrorKind::SyntaxError, problem)
}

fn deeper(depth: usize) -> Result<usize, Error> {
    if depth >= MAX_DEPTH {
        return Err(refused(format!("nested deeper than {MAX_DEPTH}, where a chain of operators counts")));
    }
    Ok(depth + 1)
}

fn statements(all: &[Stmt], depth: usize) -> Result<(), Error> {
    all.iter().try_for_each(|one| statement(one, depth))
}

fn statement(tree: &Stmt, depth: usize) -> Result<(), Error> {
    let depth = deeper(depth)?;
    match tree {
        Stmt::Template(t) => statements(&t.children, depth),
        Stmt::EmitExpr(e) => expression(&e.expr, depth),
        Stmt::EmitRaw(_) | Stmt::Continue(_) | Stmt::Break(_) => Ok(()),
        Stmt::ForLoop(f) => {
            expressions([&f.target, &f.iter].into_iter().chain(&f.filter_expr), depth)?;
            statements(&f.body, depth)?;
            statements(&f.else_body, depth)
        }
        Stmt::IfCond(i) => {
            expression(&i.expr, depth)?;
            statements(&i.true_body, depth)?;
            statements(&i.false_body, depth)
        }
        Stmt::WithBlock(w) => {
            expressions(w.assignments.iter().flat_map(|(target, value)| [target, value]), depth)?;
            statements(&w.body, depth)
        }
        Stmt::Set(s) => expressions([&s.target, &s.expr], depth),
        Stmt::SetBlock(s) => {
            expressions([&s.target].into_iter().chain(&s.filter), depth)?;
            statements(&s.body, depth)
        }
        Stmt::AutoEscape(a) => {
            expression(&a.enabled, depth)?;
            statements(&a.body, depth)
        }
        Stmt::FilterBlock(f) => {
            expression(&f.filter, depth)?;
            statements(&f.body, depth)
        }
        Stmt::Block(_) | Stmt::Import(_) | Stmt::FromImport(_) | Stmt::Extends(_) | Stmt::Include(_) => {
            Err(refused("block, import, extends and include are not supported: there is one template".into()))
        }
        Stmt::Macro(m) => macro_body(m, depth),
        Stmt::CallBlock(c) => {
            call(&c.call, depth)?;
            macro_body(&c.macro_decl, depth)
        }
        Stmt::Do(d) => call(&d.call, depth),
    }
}

fn macro_body(m: &Macro, depth: usize) -> Result<(), Error> {
    expressions(m.args.iter().chain(&m.defaults), depth)?;
    statements(&m.body, depth)
}

fn expressions<'t, 's: 't>(all: impl IntoIterator<Item = &'t Expr<'s>>, depth: usize) -> Result<(), Error> {
    let mut n_items = 0;
    for one in all {
        n_items += 1;
        if n_items > MAX_ITEMS {
            return Err(refused(format!("a list of more than {MAX_ITEMS} items written out")));
        }
        expression(one, depth)?;
    }
    Ok(())
}

fn expression(tree: &Expr, depth: usize) -> Result<(), Error> {
    let depth = deeper(depth)?;
    match tree {
        Expr::Var(_) | Expr::Const(_) => Ok(()),
        Expr::Slice(s) => {
            expressions([&s.expr].into_iter().chain(&s.start).chain(&s.stop).chain(&s.step), depth)
        }
        Expr::UnaryOp(u) => expression(&u.expr, depth),
        Expr::BinOp(b) => {
            expressions([&b.left, &b.right], depth)?;
            constant_bytes(tree).map(|_| ())
        }
        Expr::Compare(c) => expressions([&c.expr].into_iter().chain(c.ops.iter().map(|op| &op.expr)), depth),
        Expr::IfExpr(i) => expressions([&i.test_expr, &i.true_expr].into_iter().chain(&i.false_expr), depth),
        Expr::Filter(f) => {
            expressions(&f.expr, depth)?;
            arguments(&f.args, depth)
        }
        Expr::Test(t) => {
            expression(&t.expr, depth)?;
            arguments(&t.args, depth)
        }
        Expr::GetAttr(g) => expression(&g.expr, depth),
        Expr::GetItem(g) => expressions([&g.expr, &g.subscript_expr], depth),
        Expr::Call(c) => call(c, depth),
        Expr::List(l) => expressions(&l.items, depth),
        Expr::Tuple(t) => expressions(&t.items, depth),
        Expr::Map(m) => expressions(m.keys.iter().chain(&m.values), depth),
    }
}

fn call(c: &Call, depth: usize) -> Result<(), Error> {
    expression(&c.expr, depth)?;
    arguments(&c.args, depth)
}

fn arguments(all: &[CallArg], depth: usize) -> Result<(), Error> {
    let mut plain = Vec::with_capacity(all.len());
    for argument in all {
        match argument {
            CallArg::Pos(value) | CallArg::Kwarg(_, value) => plain.push(value),
            CallArg::PosSplat(_) | CallArg::KwargSplat(_) => {
                return Err(refused("arguments unpacked with * are not supported".into()));
            }
        }
    }
    expressions(plain, depth)
}

/// The bytes of a constant text or list, 0 for another constant, `None` for what is known at run time only. Refuses
/// constants that are too long.
fn constant_bytes(tree: &Expr) -> Result<Option<usize>, Error> {
    let bytes = match tree {
        Expr::Const(c) => Some(c.value.as_str().map_or(0, str::len)),
        Expr::List(l) => Some(64 * l.items.len()),
        Expr::Tuple(t) => Some(64 * t.items.len()),
        Expr::Map(m) => Some(64 * m.keys.len()),
        Expr::UnaryOp(u) => constant_bytes(&u.expr)?,
        Expr::Compare(_) => Some(0),
        Expr::BinOp(b) => match (constant_bytes(&b.left)?, constant_bytes(&b.right)?) {
            (Some(left), Some(right)) if matches!(b.op, BinOpKind::Mul) => {
                let (text, times) = if left > 0 { (left, &b.right) } else { (right, &b.left) };
                // A factor that is a number is cheap to compute.
                let times = if text == 0 || left.min(right) > 0 { None } else { times.as_const() };
                let times = times.and_then(|value| value.as_usize()).unwrap_or(1);
                Some(text.saturating_mul(times)).filter(|&bytes| bytes <= MAX_CONSTANT_BYTES).map_or_else(
                    || Err(refused(format!("a constant repeated to more than {MAX_CONSTANT_BYTES} bytes"))),
                    |bytes| Ok(Some(bytes)),
                )?
            }
            (Some(left), Some(right)) => Some(left.saturating_add(right)),
            _ => None,
        },
        _ => None,
    };
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use crate::ChatTemplate;

    /// The template, the statement and the variable are three levels.
    #[test]
    fn as_many_levels_as_the_limit_are_accepted() {
        let nested = |n: usize| {
            let source = format!("{{{{ {}messages }}}}", "not ".repeat(n));
            ChatTemplate::new("model", &source, [].into()).map(drop).map_err(|error| error.to_string())
        };
        assert_eq!(nested(super::MAX_DEPTH - 3), Ok(()));
        assert!(nested(super::MAX_DEPTH - 2).unwrap_err().contains("nested deeper than 200"));
    }
}
