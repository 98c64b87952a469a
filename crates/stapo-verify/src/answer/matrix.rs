//! Matrices, their sums, products and powers, and determinants.

use super::Answer;
use super::parts::split;
use super::quantity::Quantity;
use crate::budget::{Bounded, Budget, MAX_ELEMENTS, Stop, unreadable};
use crate::expr::Expr;
use crate::lex::token::{Bracket, Tok, Token};
use crate::parse;

/// Most rows of a determinant.
const MAX_DETERMINANT: usize = 4;
/// Most matrices of one product, powers written out.
const MAX_FACTORS: usize = 6;
/// Most nodes of the entries of a product.
const MAX_NODES: u64 = 20_000;

type Rows = Vec<Vec<Expr>>;

/// A sum of products of matrices and numbers, worked out: `2A + AB`.
pub(super) fn matrices(tokens: &[Token], depths: &[u32], budget: &mut Budget) -> Bounded<Answer> {
    let is_sign = |i: usize| {
        depths[i] == 0
            && matches!(tokens[i].tok, Tok::Plus | Tok::Minus)
            && i > 0
            && !matches!(tokens[i - 1].tok, Tok::Times | Tok::Slash | Tok::Caret)
    };
    let mut starts: Vec<usize> = (0..tokens.len()).filter(|i| *i == 0 || is_sign(*i)).collect();
    starts.push(tokens.len());
    let mut sum: Option<Rows> = None;
    for pair in starts.windows(2) {
        let &[from, to] = pair else { continue };
        let rows = product(&tokens[from..to], &depths[from..to], budget)?;
        let Some(old) = sum.take() else {
            sum = Some(rows);
            continue;
        };
        if old.len() != rows.len() || old[0].len() != rows[0].len() {
            return unreadable("a sum of matrices of different sizes");
        }
        let added = |(a, b): (Vec<Expr>, Vec<Expr>)| {
            a.into_iter().zip(b).map(|(x, y)| Expr::Add(vec![x, y])).collect::<Vec<Expr>>()
        };
        sum = Some(old.into_iter().zip(rows).map(added).collect());
    }
    match sum {
        None => unreadable("an empty sum of matrices"),
        Some(rows) => Ok(Answer::Matrix(rows)),
    }
}

/// One product: numbers before or between matrices, powers and transposes after them.
fn product(tokens: &[Token], depths: &[u32], budget: &mut Budget) -> Bounded<Rows> {
    let mut result: Option<Rows> = None;
    let mut n_factors = 0;
    let mut pos = 0;
    while pos < tokens.len() {
        let begin = (pos..tokens.len()).find(|i| depths[*i] == 0 && tokens[*i].tok == Tok::Begin);
        let numbers = &tokens[pos..begin.unwrap_or(tokens.len())];
        let factor = factor(numbers, budget)?;
        let Some(begin) = begin else {
            let Some(rows) = result else { return unreadable("a sum of a matrix and something else") };
            return Ok(scaled(rows, factor.as_ref()));
        };
        let Some(end) = (begin..tokens.len()).find(|i| depths[*i] == 0 && tokens[*i].tok == Tok::End) else {
            return unreadable("a matrix that is never closed");
        };
        let rows = matrix(&tokens[begin..=end], &depths[begin..=end], budget)?;
        pos = end + 1;
        let (power, next) = power(tokens, pos)?;
        pos = next;
        n_factors += power.n_factors();
        if n_factors > MAX_FACTORS {
            return Err(Stop::OverBudget("a product of more than six matrices"));
        }
        let rows = scaled(raised(&rows, power, budget)?, factor.as_ref());
        result = Some(match result.take() {
            Some(before) => times(&before, &rows, budget)?,
            None => rows,
        });
    }
    result.map_or_else(|| unreadable("a product without a matrix"), Ok)
}

/// The number that tokens next to a matrix represent; signs of multiplication do not count.
fn factor(tokens: &[Token], budget: &mut Budget) -> Bounded<Option<Expr>> {
    let mut tokens = tokens;
    while let [rest @ .., Token { tok: Tok::Times, .. }]
    | [Token { tok: Tok::Times | Tok::Plus, .. }, rest @ ..] = tokens
    {
        tokens = rest;
    }
    match tokens {
        [] => Ok(None),
        [Token { tok: Tok::Minus, .. }] => Ok(Some(Expr::int(-1))),
        _ => match parse::expression(tokens, budget)? {
            factor if factor.variables().contains(&"det") => unreadable("a determinant in a product"),
            factor => Ok(Some(factor)),
        },
    }
}

/// The matrix whose determinant `\det` asks for, where the matrix is all that follows, in brackets or not.
pub(super) fn under_det(tokens: &[Token]) -> Option<&[Token]> {
    let [Token { tok: Tok::Letter(name) | Tok::Word(name), .. }, inside @ ..] = tokens else { return None };
    let matrix = match inside {
        [Token { tok: Tok::Open(Bracket::Round), .. }, matrix @ .., Token { tok: Tok::Close(_), .. }] => {
            matrix
        }
        _ => inside,
    };
    let is_matrix = matches!(matrix, [Token { tok: Tok::Begin, .. }, .., Token { tok: Tok::End, .. }]);
    (name == "det" && is_matrix).then_some(matrix)
}

fn scaled(rows: Rows, factor: Option<&Expr>) -> Rows {
    let Some(factor) = factor else { return rows };
    let cell = |x: Expr| Expr::Mul(vec![factor.clone(), x]);
    rows.into_iter().map(|row| row.into_iter().map(cell).collect()).collect()
}

/// What is after a matrix.
#[derive(Debug, Clone, Copy)]
enum Power {
    Whole(usize),
    Transposed,
}

impl Power {
    fn n_factors(self) -> usize {
        match self {
            Self::Whole(n) => n,
            Self::Transposed => 1,
        }
    }
}

/// The power at `pos` and where the tokens after it begin.
fn power(tokens: &[Token], pos: usize) -> Bounded<(Power, usize)> {
    let at = |i: usize| tokens.get(i).map(|token| &token.tok);
    if at(pos) != Some(&Tok::Caret) {
        return Ok((Power::Whole(1), pos));
    }
    let is_braced = at(pos + 1) == Some(&Tok::Open(Bracket::Brace));
    let inner = pos + 1 + usize::from(is_braced);
    if is_braced && at(inner + 1) != Some(&Tok::Close(Bracket::Brace)) {
        return unreadable("a power of a matrix");
    }
    let power = match at(inner) {
        Some(Tok::Letter(name)) if matches!(name.as_str(), "T" | "top") => Power::Transposed,
        Some(Tok::Num(numeral)) if numeral.is_plain_whole() => match numeral.whole.parse() {
            Ok(n @ 1..=MAX_FACTORS) => Power::Whole(n),
            _ => return unreadable("a power of a matrix"),
        },
        _ => return unreadable("a power of a matrix"),
    };
    Ok((power, inner + 1 + usize::from(is_braced)))
}

fn raised(rows: &Rows, power: Power, budget: &mut Budget) -> Bounded<Rows> {
    match power {
        Power::Transposed => {
            Ok((0..rows[0].len()).map(|j| rows.iter().map(|row| row[j].clone()).collect()).collect())
        }
        Power::Whole(n) => {
            let mut result = rows.clone();
            for _ in 1..n {
                result = times(&result, rows, budget)?;
            }
            Ok(result)
        }
    }
}

fn times(a: &Rows, b: &Rows, budget: &mut Budget) -> Bounded<Rows> {
    if a[0].len() != b.len() {
        return unreadable("a product of matrices whose sizes do not fit");
    }
    let mut n_nodes = 0u64;
    for (cells, n_uses) in [(a, b[0].len()), (b, a.len())] {
        cells.iter().flatten().for_each(|cell| cell.walk(&mut |_| n_nodes += n_uses as u64));
    }
    if n_nodes > MAX_NODES {
        return Err(Stop::OverBudget("a product of matrices with long entries"));
    }
    budget.spend(n_nodes)?;
    let cell = |row: &[Expr], j: usize| {
        Expr::sum(row.iter().zip(b).map(|(x, other)| Expr::Mul(vec![x.clone(), other[j].clone()])).collect())
    };
    Ok(a.iter().map(|row| (0..b[0].len()).map(|j| cell(row, j)).collect()).collect())
}

/// The determinant of a square matrix between bars.
pub(super) fn determinant(tokens: &[Token], depths: &[u32], budget: &mut Budget) -> Bounded<Answer> {
    let inner: Vec<u32> = depths.iter().map(|depth| depth.saturating_sub(1)).collect();
    let depths = if depths.first() == Some(&0) { depths } else { &inner };
    let rows = matrix(tokens, depths, budget)?;
    if rows.len() > MAX_DETERMINANT || rows[0].len() != rows.len() {
        return unreadable("a determinant that is not square or has more than four rows");
    }
    let columns: Vec<usize> = (0..rows.len()).collect();
    Ok(Answer::Scalar(Quantity::bare(minor(&rows, &columns))))
}

/// The determinant of the last rows in the given columns, expanded along the first of those rows.
fn minor(rows: &[Vec<Expr>], columns: &[usize]) -> Expr {
    let Some(row) = rows.get(rows.len() - columns.len()).filter(|_| !columns.is_empty()) else {
        return Expr::int(1);
    };
    let terms = columns.iter().enumerate().map(|(i, column)| {
        let others: Vec<usize> = columns.iter().copied().filter(|other| other != column).collect();
        let term = Expr::Mul(vec![row[*column].clone(), minor(rows, &others)]);
        if i % 2 == 0 { term } else { term.negated() }
    });
    Expr::sum(terms.collect())
}

/// A matrix between `\begin` and `\end`.
fn matrix(tokens: &[Token], depths: &[u32], budget: &mut Budget) -> Bounded<Rows> {
    let [Token { tok: Tok::Begin, .. }, inside @ .., Token { tok: Tok::End, .. }] = tokens else {
        return unreadable("something behind a matrix");
    };
    let inner: Vec<u32> = depths[1..depths.len() - 1].iter().map(|d| d.saturating_sub(1)).collect();
    if depths[1..depths.len() - 1].contains(&0) {
        return unreadable("two matrices between bars");
    }
    let mut rows = Vec::new();
    let mut start = 0;
    for row in split(inside, &inner, |token| token.tok == Tok::Row) {
        let row_depths = &inner[start..start + row.len()];
        start += row.len() + 1;
        if row.is_empty() {
            continue;
        }
        let cells = split(row, row_depths, |token| token.tok == Tok::Amp);
        rows.push(
            cells.into_iter().map(|cell| parse::expression(cell, budget)).collect::<Bounded<Vec<Expr>>>()?,
        );
    }
    let width = rows.first().map_or(0, Vec::len);
    if width * rows.len() > MAX_ELEMENTS {
        return Err(Stop::OverBudget("a matrix of more than 256 elements"));
    }
    if width == 0 || rows.iter().any(|row| row.len() != width) {
        return unreadable("a matrix with uneven rows");
    }
    Ok(rows)
}
