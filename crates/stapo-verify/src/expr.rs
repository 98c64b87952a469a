//! The tree that an answer is parsed into. Sums and products are flat, so the parser's depth limit bounds the tree.

use dashu_ratio::RBig;

/// Starts the name of a variable that stands for a unit: `x > 5 cm` says `x > 5 · 1/100 · (unit m)`.
pub(crate) const UNIT: &str = "unit ";
/// Starts the name of the index of a sum or product. The term `a_k` of a sequence has that name as its subscript.
pub(crate) const INDEX: &str = "index ";

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Expr {
    /// A number as printed.
    Num {
        value: RBig,
        is_decimal: bool,
    },
    Var(String),
    Pi,
    E,
    I,
    Infinity,
    Add(Vec<Expr>),
    Mul(Vec<Expr>),
    Neg(Box<Expr>),
    Inv(Box<Expr>),
    Pow(Box<Expr>, Box<Expr>),
    /// `Root(x, n)`: the n-th root, real for odd n.
    Root(Box<Expr>, Box<Expr>),
    Call(Func, Vec<Expr>),
    /// A sum or product over an index that is not written out: the term, the first index, and the last index, which is
    /// missing where the series never ends.
    Series {
        is_sum: bool,
        index: String,
        parts: Vec<Expr>,
    },
    /// `±x`, or `∓x` when the sign is `Opposite`.
    PlusMinus(Sign, Box<Expr>),
    /// An angle in degrees.
    Degrees(Box<Expr>),
    Percent(Box<Expr>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sign {
    Same,
    Opposite,
}

/// Functions with a name. `Log` is a logarithm whose base was not written; `LogBase` has the base first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Func {
    Sin,
    Cos,
    Tan,
    Cot,
    Sec,
    Csc,
    Asin,
    Acos,
    Atan,
    Sinh,
    Cosh,
    Tanh,
    Exp,
    Ln,
    Log,
    LogBase,
    Abs,
    Floor,
    Ceil,
    Factorial,
    DoubleFactorial,
    Binomial,
    Gcd,
    Lcm,
    Max,
    Min,
    Mod,
}

impl Func {
    /// The function that a macro or a plain word names.
    pub(crate) fn named(name: &str) -> Option<Self> {
        Some(match name {
            "sin" => Self::Sin,
            "cos" => Self::Cos,
            "tan" | "tg" => Self::Tan,
            "cot" | "ctg" => Self::Cot,
            "sec" => Self::Sec,
            "csc" | "cosec" => Self::Csc,
            "arcsin" | "asin" => Self::Asin,
            "arccos" | "acos" => Self::Acos,
            "arctan" | "atan" | "arctg" => Self::Atan,
            "sinh" => Self::Sinh,
            "cosh" => Self::Cosh,
            "tanh" => Self::Tanh,
            "exp" => Self::Exp,
            "ln" => Self::Ln,
            "log" => Self::Log,
            "abs" => Self::Abs,
            "floor" => Self::Floor,
            "ceil" => Self::Ceil,
            "gcd" => Self::Gcd,
            "lcm" => Self::Lcm,
            "max" => Self::Max,
            "min" => Self::Min,
            _ => return None,
        })
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Sin => "sin",
            Self::Cos => "cos",
            Self::Tan => "tan",
            Self::Cot => "cot",
            Self::Sec => "sec",
            Self::Csc => "csc",
            Self::Asin => "arcsin",
            Self::Acos => "arccos",
            Self::Atan => "arctan",
            Self::Sinh => "sinh",
            Self::Cosh => "cosh",
            Self::Tanh => "tanh",
            Self::Exp => "exp",
            Self::Ln => "ln",
            Self::Log => "log",
            Self::LogBase => "log_base",
            Self::Abs => "abs",
            Self::Floor => "floor",
            Self::Ceil => "ceil",
            Self::Factorial => "factorial",
            Self::DoubleFactorial => "double_factorial",
            Self::Binomial => "binomial",
            Self::Gcd => "gcd",
            Self::Lcm => "lcm",
            Self::Max => "max",
            Self::Min => "min",
            Self::Mod => "mod",
        }
    }

    pub(crate) fn takes_angle(self) -> bool {
        matches!(self, Self::Sin | Self::Cos | Self::Tan | Self::Cot | Self::Sec | Self::Csc)
    }

    pub(crate) fn gives_angle(self) -> bool {
        matches!(self, Self::Asin | Self::Acos | Self::Atan)
    }

    /// Whether the function is evaluated by a series, and not by whole numbers and comparisons.
    pub(crate) fn needs_series(self) -> bool {
        !(self.is_discrete() || matches!(self, Self::Abs | Self::Floor | Self::Ceil | Self::Max | Self::Min))
    }

    /// Whether the function only has values at whole numbers.
    pub(crate) fn is_discrete(self) -> bool {
        matches!(
            self,
            Self::Factorial | Self::DoubleFactorial | Self::Binomial | Self::Gcd | Self::Lcm | Self::Mod
        )
    }
}

impl Expr {
    pub(crate) fn int(value: i64) -> Self {
        Self::Num { value: RBig::from(value), is_decimal: false }
    }

    /// A product that leaves out needless nesting.
    pub(crate) fn product(mut factors: Vec<Self>) -> Self {
        if factors.len() == 1 { factors.remove(0) } else { Self::Mul(factors) }
    }

    pub(crate) fn sum(mut terms: Vec<Self>) -> Self {
        if terms.len() == 1 { terms.remove(0) } else { Self::Add(terms) }
    }

    pub(crate) fn negated(self) -> Self {
        match self {
            Self::Num { value, is_decimal } => Self::Num { value: -value, is_decimal },
            other => Self::Neg(Box::new(other)),
        }
    }

    pub(crate) fn children(&self) -> &[Self] {
        match self {
            Self::Add(list) | Self::Mul(list) | Self::Call(_, list) | Self::Series { parts: list, .. } => {
                list
            }
            Self::Neg(x) | Self::Inv(x) | Self::PlusMinus(_, x) | Self::Degrees(x) | Self::Percent(x) => {
                std::slice::from_ref(x)
            }
            _ => &[],
        }
    }

    /// Calls `see` on every node, parents first.
    pub(crate) fn walk<'a>(&'a self, see: &mut impl FnMut(&'a Self)) {
        see(self);
        match self {
            Self::Pow(a, b) | Self::Root(a, b) => {
                a.walk(see);
                b.walk(see);
            }
            _ => self.children().iter().for_each(|child| child.walk(see)),
        }
    }

    pub(crate) fn n_nodes(&self) -> u64 {
        let mut n_nodes = 0;
        self.walk(&mut |_| n_nodes += 1);
        n_nodes
    }

    pub(crate) fn any(&self, test: impl Fn(&Self) -> bool) -> bool {
        let mut is_found = false;
        self.walk(&mut |node| is_found |= test(node));
        is_found
    }

    /// Names of the variables, sorted, each once; the index of a series is none, and neither is a term of a sequence
    /// under that index.
    pub(crate) fn variables(&self) -> Vec<&str> {
        let mut names = Vec::new();
        self.walk(&mut |node| {
            if let Self::Var(name) = node
                && !name.contains(INDEX)
            {
                names.push(name.as_str());
            }
        });
        names.sort_unstable();
        names.dedup();
        names
    }

    /// Whether a value with a unit is part of the expression.
    pub(crate) fn has_unit(&self) -> bool {
        self.any(|node| matches!(node, Self::Var(name) if name.starts_with(UNIT)))
    }

    /// The unit of every value with a unit, as factors.
    pub(crate) fn units(&self) -> Vec<&[Self]> {
        let mut units = Vec::new();
        self.walk(&mut |node| units.extend(node.unit()));
        units
    }

    /// The factors of a product with a unit that are its unit: all but the first.
    fn unit(&self) -> Option<&[Self]> {
        let Self::Mul(factors) = self else { return None };
        let [_, unit @ ..] = factors.as_slice() else { return None };
        unit.iter().any(Self::has_unit).then_some(unit)
    }

    /// A copy whose values have lost their units.
    pub(crate) fn without_units(&self) -> Self {
        self.map(&mut |node| match node {
            Self::Mul(ref factors) if node.unit().is_some() => factors[0].clone(),
            other => other,
        })
    }

    /// Whether a number with a decimal point is part of the expression.
    pub(crate) fn has_decimal(&self) -> bool {
        self.any(|node| matches!(node, Self::Num { is_decimal: true, .. }))
    }

    /// A copy with every node passed through `change`, children first.
    pub(crate) fn map(&self, change: &mut impl FnMut(Self) -> Self) -> Self {
        let rebuilt = match self {
            Self::Add(list) => Self::Add(list.iter().map(|x| x.map(change)).collect()),
            Self::Mul(list) => Self::Mul(list.iter().map(|x| x.map(change)).collect()),
            Self::Call(func, list) => Self::Call(*func, list.iter().map(|x| x.map(change)).collect()),
            Self::Series { is_sum, index, parts } => Self::Series {
                is_sum: *is_sum,
                index: index.clone(),
                parts: parts.iter().map(|x| x.map(change)).collect(),
            },
            Self::Neg(x) => Self::Neg(Box::new(x.map(change))),
            Self::Inv(x) => Self::Inv(Box::new(x.map(change))),
            Self::PlusMinus(sign, x) => Self::PlusMinus(*sign, Box::new(x.map(change))),
            Self::Degrees(x) => Self::Degrees(Box::new(x.map(change))),
            Self::Percent(x) => Self::Percent(Box::new(x.map(change))),
            Self::Pow(a, b) => Self::Pow(Box::new(a.map(change)), Box::new(b.map(change))),
            Self::Root(a, b) => Self::Root(Box::new(a.map(change)), Box::new(b.map(change))),
            leaf => leaf.clone(),
        };
        change(rebuilt)
    }
}
