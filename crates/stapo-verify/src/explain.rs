//! Readings as trees in plain words, so that a person sees why two answers differ.

use crate::answer::quantity::Quantity;
use crate::answer::region::Interval;
use crate::answer::{Answer, read};
use crate::budget::{Budget, Stop};
use crate::expr::{Expr, Sign};
use crate::lex::Notation;
use crate::show;

/// Most lines of one tree.
const MAX_LINES: usize = 200;

/// How `text` is read as an answer: one line per node, children indented by two spaces.
pub(crate) fn reading(text: &str) -> String {
    let mut tree = Tree { lines: Vec::new() };
    match read(text, Notation::default(), &mut Budget::new()) {
        Ok(answer) => tree.answer(0, &answer),
        Err(Stop::OverBudget(why) | Stop::Undefined(why)) => tree.line(0, &format!("nothing: {why}")),
        Err(Stop::Unreadable(why)) => tree.line(0, &format!("nothing: {why}")),
    }
    if tree.lines.len() == MAX_LINES {
        tree.lines.push("…".into());
    }
    tree.lines.join("\n")
}

struct Tree {
    lines: Vec<String>,
}

impl Tree {
    fn line(&mut self, depth: usize, text: &str) {
        if self.lines.len() < MAX_LINES {
            self.lines.push(format!("{:width$}{text}", "", width = 2 * depth));
        }
    }

    fn answers(&mut self, depth: usize, head: &str, items: &[Answer]) {
        self.line(depth, head);
        for item in items {
            self.answer(depth + 1, item);
        }
    }

    fn answer(&mut self, depth: usize, answer: &Answer) {
        match answer {
            Answer::Scalar(value) => self.quantity(depth, value),
            Answer::Tuple { items, .. } => {
                self.answers(depth, "a point, vector or interval, in order, of", items);
            }
            Answer::List(items) => self.answers(depth, "a list, in any order, of", items),
            Answer::Set(items) => self.answers(depth, "a set of", items),
            Answer::Region(region) => {
                let variable = region.variable.as_ref().map_or(String::new(), |name| format!(" of {name}"));
                self.line(depth, &format!("the part of the real line{variable} made of"));
                for piece in &region.pieces {
                    self.interval(depth + 1, piece);
                }
            }
            Answer::Matrix(rows) => {
                self.line(depth, &format!("a matrix of {} rows and {} columns", rows.len(), rows[0].len()));
                for cell in rows.iter().flatten() {
                    self.expr(depth + 1, cell);
                }
            }
            Answer::Cases(cases) => {
                self.line(depth, "by cases");
                for (value, condition) in cases {
                    self.line(depth + 1, "the value");
                    self.answer(depth + 2, value);
                    self.line(depth + 1, "under the condition");
                    self.answer(depth + 2, condition);
                }
            }
            Answer::Named { name, value, .. } => {
                self.line(depth, &format!("the name {name} stands for"));
                self.answer(depth + 1, value);
            }
            Answer::Equation(left, right) => {
                self.line(depth, "an equation between");
                self.expr(depth + 1, left);
                self.quantity(depth + 1, right);
            }
            Answer::Inequality(left, rel, right) => {
                self.line(depth, &format!("an inequality with {} between", rel.sign()));
                self.exprs(depth + 1, &[left.clone(), right.clone()]);
            }
            Answer::Ratio(parts) => {
                self.line(depth, "a ratio of");
                self.exprs(depth + 1, parts);
            }
            Answer::Choice { letter, rest } => {
                self.line(depth, &format!("the choice {letter}"));
                if let Some(rest) = rest {
                    self.answer(depth + 1, rest);
                }
            }
            Answer::Run(run) => self.line(depth, &format!("the letters {run}, as a word or a product")),
            Answer::Empty => self.line(depth, "the empty set"),
            Answer::Text { words, broken: None } => {
                self.line(depth, &format!("the words \"{}\"", show::shortened(words)));
            }
            Answer::Text { words, broken: Some(why) } => {
                self.line(depth, &format!("a formula that is not read, because of {why}"));
                self.line(depth + 1, &show::shortened(words));
            }
        }
    }

    fn quantity(&mut self, depth: usize, value: &Quantity) {
        match &value.unit {
            Some(unit) => {
                self.line(depth, &format!("in the unit {}", unit.shown));
                self.expr(depth + 1, &value.expr);
            }
            None => self.expr(depth, &value.expr),
        }
    }

    fn interval(&mut self, depth: usize, piece: &Interval) {
        for (word, end) in [("from", &piece.low), ("to", &piece.high)] {
            let included = if end.is_closed { "included" } else { "left out" };
            self.line(depth, &format!("{word} (the end is {included})"));
            self.expr(depth + 1, &end.at);
        }
    }

    fn exprs(&mut self, depth: usize, list: &[Expr]) {
        for expr in list {
            self.expr(depth, expr);
        }
    }

    fn expr(&mut self, depth: usize, expr: &Expr) {
        let head = match expr {
            Expr::Num { value, is_decimal: true } => {
                format!("the number {}, printed as a decimal", show::ratio(value))
            }
            Expr::Num { value, is_decimal: false } => format!("the number {}", show::ratio(value)),
            Expr::Var(name) => format!("the variable {name}"),
            Expr::Pi => "the constant pi".into(),
            Expr::E => "the constant e".into(),
            Expr::I => "the imaginary unit".into(),
            Expr::Infinity => "infinity".into(),
            Expr::Add(_) => "the sum of".into(),
            Expr::Mul(_) => "the product of".into(),
            Expr::Neg(_) => "the negative of".into(),
            Expr::Inv(_) => "one over".into(),
            Expr::Pow(..) => "a power with base and exponent".into(),
            Expr::Root(..) => "a root with radicand and degree".into(),
            Expr::Call(func, _) => format!("the function {} of", func.name()),
            Expr::Series { is_sum, index, parts } => {
                let what = if *is_sum { "sum" } else { "product" };
                let end = if parts.len() == 3 { "the first and the last" } else { "without end, the first" };
                format!("the {what} over {index}, with the term and {end} index")
            }
            Expr::PlusMinus(Sign::Same, _) => "plus or minus".into(),
            Expr::PlusMinus(Sign::Opposite, _) => "minus or plus".into(),
            Expr::Degrees(_) => "in degrees".into(),
            Expr::Percent(_) => "in percent".into(),
        };
        self.line(depth, &head);
        match expr {
            Expr::Pow(a, b) | Expr::Root(a, b) => {
                self.expr(depth + 1, a);
                self.expr(depth + 1, b);
            }
            _ => self.exprs(depth + 1, expr.children()),
        }
    }
}
