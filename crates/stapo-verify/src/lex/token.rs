//! The tokens that the text of an answer is cut into.

use crate::expr::Func;
use crate::lex::numeral::Numeral;

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Tok {
    Num(Numeral),
    /// One variable: a letter, a Greek letter, or a macro without a special meaning.
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
    /// `\over`: the group before it over the group after it.
    Over,
    Sqrt,
    /// The radical sign and its degree. Unlike `\sqrt`, the sign applies to a whole number: √12.
    Radical(u32),
    Accent(&'static str),
    Mod,
    Sum,
    Product,
    Integral,
    /// The start and the end of a matrix.
    Begin,
    End,
    /// The start and the end of lines one below the other, such as `cases` and `aligned`.
    BeginLines(Lines),
    EndLines(Lines),
    Amp,
    Row,
    /// A sign or macro that is not read as mathematics.
    Other(String),
}

impl Tok {
    /// The token as part of a name or of a text that is compared sign by sign; different tokens are spelled differently.
    pub(crate) fn spelled(&self) -> String {
        let sign = match self {
            Self::Num(numeral) => return numeral.spelled(),
            Self::Letter(name) | Self::Word(name) | Self::Other(name) => return name.clone(),
            Self::Func(func) => func.name(),
            Self::Rel(rel) => rel.sign(),
            Self::Plus => "+",
            Self::Minus => "-",
            Self::Comma => ",",
            Self::Semicolon => ";",
            Self::Colon => ":",
            Self::E => "e",
            Self::I => "i",
            Self::Pi => "pi",
            Self::Caret => "^",
            Self::Under => "_",
            Self::Times => "*",
            Self::Slash => "/",
            Self::Bang => "!",
            Self::Prime => "'",
            Self::Percent => "%",
            Self::Degree => "°",
            Self::Bar => "|",
            Self::Open(Bracket::Round) => "(",
            Self::Close(Bracket::Round) => ")",
            Self::Open(Bracket::Square) => "[",
            Self::Close(Bracket::Square) => "]",
            Self::Open(Bracket::Brace) => "{",
            Self::Close(Bracket::Brace) => "}",
            Self::Frac => "\\frac",
            Self::Sqrt => "\\sqrt",
            other => return format!("{other:?}").to_lowercase(),
        };
        sign.to_owned()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lines {
    /// Columns may set a value apart from its condition.
    Cases,
    /// Columns only align.
    Aligned,
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
    /// White space or a spacing macro is before the token.
    pub(crate) is_spaced: bool,
    /// A wide space such as `\quad` is before the token.
    pub(crate) is_apart: bool,
    /// The token is inside `\text{}` or a similar macro.
    pub(crate) is_text: bool,
}
