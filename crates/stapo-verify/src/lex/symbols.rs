//! Unicode signs and LaTeX macros with a meaning.

use crate::expr::Func;
use crate::lex::token::{Bracket, Rel, Tok};

/// A character that stands for one token.
pub(crate) fn sign(c: char) -> Option<Tok> {
    Some(match c {
        '+' | '＋' => Tok::Plus,
        '-' | '−' | '–' | '—' | '‐' | '‑' | '－' | '﹣' => Tok::Minus,
        '±' => Tok::PlusMinus,
        '∓' => Tok::MinusPlus,
        '*' | '×' | '·' | '⋅' | '∙' | '•' | '✕' | '∗' => Tok::Times,
        '/' | '÷' | '∕' | '⁄' | '／' => Tok::Slash,
        '^' => Tok::Caret,
        '_' => Tok::Under,
        '!' | '！' => Tok::Bang,
        '\'' | '′' | '’' => Tok::Prime,
        '%' | '％' => Tok::Percent,
        '°' | 'º' | '˚' => Tok::Degree,
        '€' => Tok::Currency("euro"),
        '£' => Tok::Currency("pound-sterling"),
        '¥' | '￥' => Tok::Currency("yen"),
        '₹' => Tok::Currency("rupee"),
        '¢' => Tok::Word("cent".into()),
        '=' | '＝' => Tok::Rel(Rel::Eq),
        '≠' => Tok::Rel(Rel::Ne),
        '<' | '＜' => Tok::Rel(Rel::Lt),
        '≤' | '⩽' | '≦' => Tok::Rel(Rel::Le),
        '>' | '＞' => Tok::Rel(Rel::Gt),
        '≥' | '⩾' | '≧' => Tok::Rel(Rel::Ge),
        '≈' | '≃' | '≅' => Tok::Rel(Rel::Approx),
        '∈' => Tok::In,
        '∪' => Tok::Cup,
        '∩' => Tok::Cap,
        '∖' => Tok::SetMinus,
        '∠' => Tok::Accent("angle"),
        '△' => Tok::Accent("triangle"),
        '∨' => Tok::Other("\\lor".into()),
        '∧' => Tok::Other("\\land".into()),
        '∅' | 'Ø' | 'ø' | '⌀' => Tok::Empty,
        '∞' => Tok::Infinity,
        'π' => Tok::Pi,
        '∑' => Tok::Sum,
        '∏' => Tok::Product,
        '∫' => Tok::Integral,
        '√' => Tok::Radical(2),
        '∛' => Tok::Radical(3),
        '∜' => Tok::Radical(4),
        ',' | '，' | '、' => Tok::Comma,
        ';' | '；' => Tok::Semicolon,
        ':' | '：' | '∶' => Tok::Colon,
        '…' | '⋯' => Tok::Dots,
        '(' | '（' => Tok::Open(Bracket::Round),
        ')' | '）' => Tok::Close(Bracket::Round),
        '[' | '【' => Tok::Open(Bracket::Square),
        ']' | '】' => Tok::Close(Bracket::Square),
        '{' => Tok::Open(Bracket::Brace),
        '}' => Tok::Close(Bracket::Brace),
        '⟨' | '〈' => Tok::Open(Bracket::Angle),
        '⟩' | '〉' => Tok::Close(Bracket::Angle),
        '⌊' => Tok::Open(Bracket::Floor),
        '⌋' => Tok::Close(Bracket::Floor),
        '⌈' => Tok::Open(Bracket::Ceil),
        '⌉' => Tok::Close(Bracket::Ceil),
        '|' | '∣' => Tok::Bar,
        '&' => Tok::Amp,
        'ℝ' => Tok::Word("reals".into()),
        'ℤ' => Tok::Word("integers".into()),
        'ℚ' => Tok::Word("rationals".into()),
        'ℕ' => Tok::Word("naturals".into()),
        'ℂ' => Tok::Word("complexes".into()),
        _ => return greek(c).map(|name| Tok::Letter(name.into())),
    })
}

/// A full-width digit or letter, one of the mathematical alphabets, or an Arabic-Indic, Persian or Devanagari digit, as the
/// ordinary one.
pub(crate) fn narrow(c: char) -> char {
    match c {
        // The alphabets hold 26 capital and 26 small letters in turn; the digits come in five styles of ten.
        '𝐀'..='𝚣' => match (c as u32 - '𝐀' as u32) % 52 {
            i @ 0..26 => char::from(b'A' + i as u8),
            i => char::from(b'a' + (i - 26) as u8),
        },
        '𝟎'..='𝟿' => char::from(b'0' + ((c as u32 - '𝟎' as u32) % 10) as u8),
        '٠'..='٩' => char::from(b'0' + (c as u32 - '٠' as u32) as u8),
        '۰'..='۹' => char::from(b'0' + (c as u32 - '۰' as u32) as u8),
        '०'..='९' => char::from(b'0' + (c as u32 - '०' as u32) as u8),
        '٫' => '.',
        '０'..='９' | 'Ａ'..='Ｚ' | 'ａ'..='ｚ' => char::from_u32(c as u32 - 0xfee0).unwrap_or(c),
        _ => c,
    }
}

/// A raised digit or sign as the plain one.
pub(crate) fn superscript(c: char) -> Option<char> {
    Some(match c {
        '⁰' => '0',
        '¹' => '1',
        '²' => '2',
        '³' => '3',
        '⁴' => '4',
        '⁵' => '5',
        '⁶' => '6',
        '⁷' => '7',
        '⁸' => '8',
        '⁹' => '9',
        '⁺' => '+',
        '⁻' => '-',
        '⁽' => '(',
        '⁾' => ')',
        'ⁿ' => 'n',
        'ˣ' => 'x',
        'ⁱ' => 'i',
        _ => return None,
    })
}

/// A lowered digit or sign as the plain one.
pub(crate) fn subscript(c: char) -> Option<char> {
    Some(match c {
        '₀'..='₉' => char::from(b'0' + (c as u32 - '₀' as u32) as u8),
        '₊' => '+',
        '₋' => '-',
        'ₙ' => 'n',
        'ₓ' => 'x',
        'ᵢ' => 'i',
        'ₖ' => 'k',
        _ => return None,
    })
}

/// Numerator and denominator of a fraction that is one character.
pub(crate) fn vulgar_fraction(c: char) -> Option<(&'static str, &'static str)> {
    Some(match c {
        '½' => ("1", "2"),
        '⅓' => ("1", "3"),
        '⅔' => ("2", "3"),
        '¼' => ("1", "4"),
        '¾' => ("3", "4"),
        '⅕' => ("1", "5"),
        '⅖' => ("2", "5"),
        '⅗' => ("3", "5"),
        '⅘' => ("4", "5"),
        '⅙' => ("1", "6"),
        '⅚' => ("5", "6"),
        '⅐' => ("1", "7"),
        '⅛' => ("1", "8"),
        '⅜' => ("3", "8"),
        '⅝' => ("5", "8"),
        '⅞' => ("7", "8"),
        '⅑' => ("1", "9"),
        '⅒' => ("1", "10"),
        _ => return None,
    })
}

fn greek(c: char) -> Option<&'static str> {
    Some(match c {
        'α' => "alpha",
        'β' => "beta",
        'γ' => "gamma",
        'δ' => "delta",
        'Δ' => "Delta",
        'ε' | 'ϵ' => "epsilon",
        'ζ' => "zeta",
        'η' => "eta",
        'θ' => "theta",
        'Θ' => "Theta",
        'κ' => "kappa",
        'λ' => "lambda",
        'Λ' => "Lambda",
        'μ' | 'µ' => "mu",
        'ν' => "nu",
        'ξ' => "xi",
        'Π' => "Pi",
        'ρ' => "rho",
        'σ' => "sigma",
        'Σ' => "Sigma",
        'τ' => "tau",
        'φ' | 'ϕ' => "phi",
        'Φ' => "Phi",
        'χ' => "chi",
        'ψ' => "psi",
        'ω' => "omega",
        'Ω' => "Omega",
        _ => return None,
    })
}

/// What a macro does to the text around it.
pub(crate) enum Macro {
    Token(Tok),
    /// White space.
    Space,
    /// No effect, not even as white space.
    Nothing,
    /// The group after the macro is text.
    Text,
    /// The group after the macro is upright mathematics: a unit, a function or a letter.
    Upright,
    /// The group after the macro is read as if the macro were not there.
    Transparent,
    /// The group after the macro is dropped.
    Discard,
    /// The macro sets the size of the bracket after it; a full stop stands for an invisible bracket.
    Sized,
}

/// What the macro `name` does. A name that is neither known nor a letter is a sign that is not read: `\otimes`.
pub(crate) fn macro_named(name: &str) -> Macro {
    if let Some(layout) = layout_macro(name) {
        return layout;
    }
    let letter = name.strip_prefix("var").unwrap_or(name);
    let tok = match (sign_macro(name), Func::named(name)) {
        (Some(tok), _) => tok,
        (None, Some(func)) => Tok::Func(func),
        (None, None) if is_letter(letter) => Tok::Letter(letter.into()),
        (None, None) => Tok::Other(format!("\\{name}")),
    };
    Macro::Token(tok)
}

/// How much of a macro's name is the macro where the white space after it was lost: `\quadx` is `\quad x`.
pub(crate) fn unglued(name: &str) -> usize {
    let glued = ["qquad", "quad", "cdot", "times", "pi", "pm"].into_iter().find(|known| {
        let rest = name.strip_prefix(known).unwrap_or("");
        rest.len() == 1 || (!rest.is_empty() && known.ends_with("quad"))
    });
    glued.filter(|_| !is_known(name)).map_or(name.len(), str::len)
}

/// Whether a macro of this name has a meaning here.
pub(crate) fn is_known(name: &str) -> bool {
    layout_macro(name).is_some() || sign_macro(name).is_some() || Func::named(name).is_some()
}

/// Macros about spacing, fonts and sizes.
fn layout_macro(name: &str) -> Option<Macro> {
    Some(match name {
        "" | "quad" | "qquad" | "," | ";" | ":" | " " | ">" | "enspace" | "thinspace" | "medspace"
        | "thickspace" | "newline" | "hfill" | "space" | "par" | "smallskip" | "medskip" => Macro::Space,
        "!" | "displaystyle" | "textstyle" | "scriptstyle" | "limits" | "nolimits" | "mathstrut"
        | "strut" | "noindent" | "negthinspace" | "nonumber" | "(" | ")" | "[" | "]" | "Large" | "large"
        | "bf" | "rm" | "it" | "centering" | "boldmath" | "mathop" | "mathrel" | "mathbin" | "hline" => {
            Macro::Nothing
        }
        "left" | "right" | "middle" | "big" | "Big" | "bigg" | "Bigg" | "bigl" | "bigr" | "Bigl" | "Bigr"
        | "biggl" | "biggr" | "Biggl" | "Biggr" | "bigm" => Macro::Sized,
        "text" | "mbox" | "textbf" | "textit" | "textrm" | "texttt" | "textsf" | "textnormal" | "hbox"
        | "emph" | "textsc" | "textup" => Macro::Text,
        "mathrm" | "operatorname" | "operatorname*" | "mathsf" | "mathtt" | "unit" | "si" => Macro::Upright,
        "mathbf" | "mathit" | "mathcal" | "mathscr" | "mathfrak" | "boldsymbol" | "bm" | "pmb" | "boxed"
        | "fbox" | "underline" | "ensuremath" | "mathnormal" | "smash" => Macro::Transparent,
        "hspace" | "hspace*" | "vspace" | "phantom" | "hphantom" | "vphantom" | "color" | "textcolor"
        | "tag" | "label" | "kern" => Macro::Discard,
        _ => return None,
    })
}

/// Macros that stand for one token.
fn sign_macro(name: &str) -> Option<Tok> {
    Some(match name {
        "pi" => Tok::Pi,
        "infty" | "infin" => Tok::Infinity,
        "emptyset" | "varnothing" | "O" => Tok::Empty,
        "imath" | "mathbbi" => Tok::I,
        "jmath" => Tok::Letter("j".into()),
        "cdot" | "times" | "ast" | "bullet" | "cdotp" | "star" => Tok::Times,
        "div" | "slash" => Tok::Slash,
        "pm" | "plusmn" => Tok::PlusMinus,
        "mp" => Tok::MinusPlus,
        "le" | "leq" | "leqslant" | "leqq" => Tok::Rel(Rel::Le),
        "ge" | "geq" | "geqslant" | "geqq" => Tok::Rel(Rel::Ge),
        "lt" | "less" => Tok::Rel(Rel::Lt),
        "gt" => Tok::Rel(Rel::Gt),
        "ne" | "neq" => Tok::Rel(Rel::Ne),
        "approx" | "simeq" | "cong" | "thickapprox" => Tok::Rel(Rel::Approx),
        "equiv" | "coloneqq" => Tok::Rel(Rel::Eq),
        "in" | "isin" => Tok::In,
        "cup" | "bigcup" => Tok::Cup,
        "cap" | "bigcap" => Tok::Cap,
        "setminus" | "backslash" | "smallsetminus" => Tok::SetMinus,
        "{" | "lbrace" => Tok::Open(Bracket::Set),
        "}" | "rbrace" => Tok::Close(Bracket::Set),
        "lbrack" => Tok::Open(Bracket::Square),
        "rbrack" => Tok::Close(Bracket::Square),
        "lparen" => Tok::Open(Bracket::Round),
        "rparen" => Tok::Close(Bracket::Round),
        "langle" => Tok::Open(Bracket::Angle),
        "rangle" => Tok::Close(Bracket::Angle),
        "lfloor" => Tok::Open(Bracket::Floor),
        "rfloor" => Tok::Close(Bracket::Floor),
        "lceil" => Tok::Open(Bracket::Ceil),
        "rceil" => Tok::Close(Bracket::Ceil),
        "lvert" | "rvert" | "vert" | "lVert" | "rVert" | "Vert" | "|" => Tok::Bar,
        "mid" => Tok::Mid,
        "frac" | "dfrac" | "tfrac" | "cfrac" | "nicefrac" | "sfrac" => Tok::Frac,
        "binom" | "dbinom" | "tbinom" => Tok::Binom,
        "choose" => Tok::Choose,
        "over" => Tok::Over,
        "sqrt" => Tok::Sqrt,
        "overline" | "bar" => Tok::Accent("bar"),
        "hat" | "widehat" => Tok::Accent("hat"),
        "tilde" | "widetilde" => Tok::Accent("tilde"),
        "vec" | "overrightarrow" => Tok::Accent("vec"),
        "dot" => Tok::Accent("dot"),
        "ddot" => Tok::Accent("ddot"),
        "overarc" | "wideparen" | "overset" | "underset" | "stackrel" => Tok::Accent("over"),
        "circ" | "degree" | "textdegree" => Tok::Degree,
        "prime" => Tok::Prime,
        "%" => Tok::Percent,
        "$" | "textdollar" => Tok::Currency("dollar"),
        "euro" | "texteuro" => Tok::Currency("euro"),
        "pounds" | "textsterling" => Tok::Currency("pound-sterling"),
        "yen" => Tok::Currency("yen"),
        "cent" | "textcent" => Tok::Word("cent".into()),
        "ldots" | "dots" | "cdots" | "dotsc" | "dotsb" => Tok::Dots,
        "bmod" | "mod" => Tok::Mod,
        "sum" => Tok::Sum,
        "prod" => Tok::Product,
        "int" => Tok::Integral,
        "\\" | "cr" => Tok::Row,
        "&" => Tok::Amp,
        "_" => Tok::Other("_".into()),
        "#" => Tok::Other("#".into()),
        "colon" => Tok::Colon,
        "lor" | "vee" => Tok::Other("\\lor".into()),
        "land" | "wedge" => Tok::Other("\\land".into()),
        "angle" | "measuredangle" => Tok::Accent("angle"),
        "triangle" => Tok::Accent("triangle"),
        _ => return None,
    })
}

/// Macros that are variables or names: the Greek letters, other letters, and operators that are before a name.
fn is_letter(name: &str) -> bool {
    const LETTERS: [&str; 52] = [
        "alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda",
        "mu", "nu", "xi", "omicron", "pi", "rho", "sigma", "tau", "upsilon", "phi", "chi", "psi", "omega",
        "Gamma", "Delta", "Theta", "Lambda", "Xi", "Pi", "Sigma", "Upsilon", "Phi", "Psi", "Omega", "ell",
        "hbar", "aleph", "wp", "Re", "Im", "top", "det", "dim", "deg", "ker", "rank", "Pr", "arg", "sup",
        "inf", "tr",
    ];
    LETTERS.contains(&name)
}
