//! Runs of letters: constants, functions, variables and words.

use super::token::{Bracket, Tok, Token};
use super::{GroupKind, Lexer};
use crate::expr::Func;
use crate::units;

impl Lexer<'_> {
    /// A run of letters: a constant, a function, a variable or a word.
    pub(super) fn letters(&mut self) {
        let n = self.chars[self.pos..].iter().take_while(|c| c.is_ascii_alphabetic()).count();
        let run: String = self.chars[self.pos..self.pos + n].iter().collect();
        // Python's module names, as in `math.pi` and `np.sqrt(2)`, are dropped.
        let is_module = matches!(run.as_str(), "np" | "math" | "sympy" | "sp")
            && self.chars.get(self.pos + n) == Some(&'.');
        self.pos += n;
        if is_module {
            self.pos += 1;
            return;
        }
        let group = self.groups.last().copied().unwrap_or(GroupKind::Math);
        if group == GroupKind::Upright
            && let Some(tok) = upright(&run)
        {
            return self.push(tok);
        }
        if matches!(group, GroupKind::Text | GroupKind::Upright) {
            let is_alone =
                self.chars.get(self.pos) == Some(&'}') && self.pos > 1 && self.chars[self.pos - 2] == '{';
            if run == "e" && is_alone {
                return self.push(Tok::E);
            }
            // `\text{lcm}(4,6)`
            if let Some(func) = Func::named(&run)
                && (self.at("}(") || self.at("}\\left("))
            {
                return self.push(Tok::Func(func));
            }
            return self.push(if is_percent(&run) { Tok::Percent } else { Tok::Word(run) });
        }
        match run.as_str() {
            "sqrt" => self.push(Tok::Radical(2)),
            "cbrt" => self.push(Tok::Radical(3)),
            "pi" | "Pi" | "PI" => self.push(Tok::Pi),
            "inf" | "infty" | "infinity" | "Infinity" | "oo" => self.push(Tok::Infinity),
            "e" => self.push(Tok::E),
            "i" => self.push(Tok::I),
            _ if is_percent(&run) => self.push(Tok::Percent),
            _ => self.run_of_letters(run),
        }
    }

    fn run_of_letters(&mut self, run: String) {
        if let Some(func) = Func::named(&run) {
            return self.push(Tok::Func(func));
        }
        if run.len() == 1 {
            return self.push(Tok::Letter(run));
        }
        // A function written together with its argument: `sinx`, `lnx`.
        for length in (2..run.len()).rev() {
            if run.len() - length <= 2
                && !units::is_word(&run)
                && let Some(func) = Func::named(&run[..length])
            {
                self.push(Tok::Func(func));
                self.pos -= run.len() - length;
                return;
            }
        }
        self.push(Tok::Word(run));
    }

    /// A word in letters other than a to z.
    pub(super) fn foreign_word(&mut self) {
        let start = self.pos - 1;
        // Chinese words follow letters without a space: `x<1或x>2`.
        let is_chinese = |c: &char| ('\u{4e00}'..='\u{9fff}').contains(c);
        let starts_chinese = is_chinese(&self.chars[start]);
        while self.chars.get(self.pos).is_some_and(|c| c.is_alphabetic() && is_chinese(c) == starts_chinese) {
            self.pos += 1;
        }
        self.push(Tok::Word(self.chars[start..self.pos].iter().collect()));
    }
}

fn is_percent(run: &str) -> bool {
    matches!(run, "percent" | "percentage" | "pct")
}

/// The function, constant or variable that an upright run of letters is, unless the run is a unit.
fn upright(run: &str) -> Option<Tok> {
    if let Some(func) = Func::named(run) {
        return Some(Tok::Func(func));
    }
    match run {
        "e" => Some(Tok::E),
        "i" => Some(Tok::I),
        "d" => Some(Tok::Letter(UPRIGHT_D.into())),
        _ if run.len() == 1 && units::lookup(run).is_none() => Some(Tok::Letter(run.into())),
        _ => None,
    }
}

/// The name of an upright `d` until the variable after it is known.
const UPRIGHT_D: &str = "\\mathrm{d}";

/// Joins the `d` of a differential with its variable, so that the `d` of `dy/dx` does not cancel. A plain `d` belongs to
/// a differential in `dx`, in `d\theta`, and alone with a letter in a part of a fraction, as in `\frac{d x}{d t}`.
fn join_differentials(tokens: &mut Vec<Token>) {
    let is_d = |token: &Token| matches!(&token.tok, Tok::Letter(name) if name == "d" || name == UPRIGHT_D);
    let mut is_joined = vec![false; tokens.len()];
    for i in 0..tokens.len() {
        if is_joined[i] {
            continue;
        }
        if let Tok::Word(run) = &tokens[i].tok
            && !tokens[i].is_text
            && let [b'd', b'x' | b'y' | b'z' | b't' | b'u' | b'v' | b'r' | b's'] = run.as_bytes()
        {
            tokens[i].tok = Tok::Letter(run.clone());
        } else if is_d(&tokens[i])
            && let Some(Token { tok: Tok::Letter(name), is_spaced, .. }) = tokens.get(i + 1)
        {
            let starts_part = i > 0 && tokens[i - 1].tok == Tok::Open(Bracket::Brace);
            let ends_part =
                matches!(tokens.get(i + 2).map(|t| &t.tok), Some(Tok::Close(Bracket::Brace) | Tok::Caret));
            let is_upright = tokens[i].tok == Tok::Letter(UPRIGHT_D.into());
            let is_greek = name.len() > 1 && !is_spaced;
            if is_upright || is_greek || (starts_part && ends_part) {
                tokens[i].tok = Tok::Letter(format!("d{name}"));
                is_joined[i + 1] = true;
            }
        }
        if tokens[i].tok == Tok::Letter(UPRIGHT_D.into()) {
            tokens[i].tok = Tok::Letter("d".into());
        }
    }
    let mut joined = is_joined.into_iter();
    tokens.retain(|_| !joined.next().unwrap_or(false));
}

/// Replaces letters whose meaning depends on the tokens around them: `6.02 x 10^23`, `101 base 2`, `25° C`.
pub(super) fn resolve_letters(tokens: &mut Vec<Token>) {
    join_differentials(tokens);
    let is = |token: Option<&Token>, name: &str| matches!(token.map(|t| &t.tok), Some(Tok::Letter(text) | Tok::Word(text)) if text == name);
    let is_number = |token: Option<&Token>| matches!(token.map(|t| &t.tok), Some(Tok::Num(_)));
    for i in 1..tokens.len() {
        let is_ten = matches!(tokens.get(i + 1).map(|t| &t.tok), Some(Tok::Num(n)) if n.whole == "10");
        let is_raised = tokens.get(i + 2).map(|t| &t.tok) == Some(&Tok::Caret);
        let after_number = is_number(tokens.get(i - 1));
        if after_number && is_ten && is_raised && (is(tokens.get(i), "x") || is(tokens.get(i), "X")) {
            tokens[i].tok = Tok::Times;
        }
        let is_last = i + 1 == tokens.len();
        if is_last && tokens[i - 1].tok == Tok::Degree && (is(tokens.get(i), "C") || is(tokens.get(i), "F")) {
            tokens[i].tok = Tok::Word(if is(tokens.get(i), "C") { "celsius" } else { "fahrenheit" }.into());
        }
        // At the end, as in `5 min` and `30 sec`, these are units and not functions without an argument.
        match tokens[i].tok {
            Tok::Func(func @ (Func::Min | Func::Sec)) if is_last => {
                tokens[i].tok = Tok::Word(func.name().into());
            }
            _ => {}
        }
        if after_number && is(tokens.get(i), "per") && is(tokens.get(i + 1), "cent") && i + 2 == tokens.len()
        {
            tokens[i].tok = Tok::Percent;
            tokens.pop();
            break;
        }
        if after_number && is(tokens.get(i), "base") && is_number(tokens.get(i + 1)) {
            tokens[i].tok = Tok::Under;
        }
    }
    // `2 to 3` is a ratio.
    if let [first, to, second] = tokens.as_mut_slice()
        && is_number(Some(first))
        && is(Some(to), "to")
        && is_number(Some(second))
    {
        to.tok = Tok::Colon;
    }
    let is_ordinal = |token: &Token| {
        !token.is_spaced
            && matches!(&token.tok, Tok::Word(word) if matches!(word.as_str(), "st" | "nd" | "rd" | "th"))
    };
    if let [.., number, ending] = tokens.as_slice()
        && is_number(Some(number))
        && is_ordinal(ending)
    {
        tokens.pop();
    }
    // `101 (base 2)` becomes 101_2.
    if let [.., digits, open, word, base, close] = tokens.as_slice()
        && is_number(Some(digits))
        && open.tok == Tok::Open(Bracket::Round)
        && is(Some(word), "base")
        && is_number(Some(base))
        && close.tok == Tok::Close(Bracket::Round)
    {
        let n = tokens.len();
        tokens[n - 3].tok = Tok::Under;
        tokens.remove(n - 1);
        tokens.remove(n - 4);
    }
}
