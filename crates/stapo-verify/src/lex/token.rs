//! The tokens that the text of an answer is cut into.

use crate::expr::Func;
use crate::lex::numeral::Numeral;

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Tok {
    Num(Numeral),
    /// One variable: a letter, a Greek letter, or a macro without a meaning of its own.
    Letter(String),
    /// A run of letters: a word of the language, a unit, or a product of variables.
    Word(String),
    Func(Func),
    Pi,
    E,
    I,
    Infinity,
    Empty,
    Plus,
    Minus,
    PlusMinus,
    MinusPlus,
    Times,
    Slash,
    Caret,
    Under,
    Bang,
    Prime,
    Percent,
    Degree,
    /// A currency sign, as the word of its unit.
    Currency(&'static str),
    Rel(Rel),
    In,
    Cup,
    Cap,
    SetMinus,
    Comma,
    Semicolon,
    Colon,
    Dots,
    Open(Bracket),
    Close(Bracket),
    Bar,
    Mid,
    Frac,
    Binom,
    Choose,
    /// `\over`: the group before it over the group behind it.
    Over,
    Sqrt,
    /// The radical sign and its degree. Unlike `\sqrt`, the sign applies to a whole number: √12.
    Radical(u32),
    Accent(&'static str),
    Mod,
    Sum,
    Product,
    Begin,
    End,
    Amp,
    Row,
    /// A sign or macro that is not read as mathematics.
    Other(String),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rel {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    Approx,
}

impl Rel {
    pub(crate) fn is_order(self) -> bool {
        matches!(self, Self::Lt | Self::Le | Self::Gt | Self::Ge)
    }

    /// The same relation read from right to left.
    pub(crate) fn mirrored(self) -> Self {
        match self {
            Self::Lt => Self::Gt,
            Self::Le => Self::Ge,
            Self::Gt => Self::Lt,
            Self::Ge => Self::Le,
            other => other,
        }
    }

    pub(crate) fn sign(self) -> &'static str {
        match self {
            Self::Eq => "=",
            Self::Ne => "!=",
            Self::Lt => "<",
            Self::Le => "<=",
            Self::Gt => ">",
            Self::Ge => ">=",
            Self::Approx => "~",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Bracket {
    Round,
    Square,
    /// A LaTeX group, invisible in print.
    Brace,
    /// `\{ \}`
    Set,
    Angle,
    Floor,
    Ceil,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Token {
    pub(crate) tok: Tok,
    /// White space or a spacing macro stands before the token.
    pub(crate) is_spaced: bool,
    /// A wide space such as `\quad` stands before the token.
    pub(crate) is_apart: bool,
    /// The token stands inside `\text{}` or a similar macro.
    pub(crate) is_text: bool,
}
