//! Silenced tokens by category, and the most frequent ones as bars.

use crate::shared::chart::{Bar, BarGroup, Bars, Figure, Ink};
use crate::shared::html::visible;
use crate::shared::study::table::{Cell, Table, text};
use stapo_core::TokenCategory;
use stapo_core::objective::MaskKind;
use stapo_core::record::TokenRecord;
use std::collections::BTreeMap;

/// What kind of token something is, by its text and what is around it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Category {
    TyposAndSyntax,
    DigitsAndOperators,
    Format,
    Words,
}

impl Category {
    const ALL: [Self; 4] = [Self::TyposAndSyntax, Self::DigitsAndOperators, Self::Format, Self::Words];

    fn name(self) -> &'static str {
        match self {
            Self::TyposAndSyntax => "typos and syntax",
            Self::DigitsAndOperators => "digits and operators",
            Self::Format => "format",
            Self::Words => "whole words",
        }
    }

    fn rule(self) -> &'static str {
        match self {
            Self::TyposAndSyntax => "letters within a word, and punctuation",
            Self::DigitsAndOperators => "digits, arithmetic and comparison signs, parentheses",
            Self::Format => "white space, ends, LaTeX commands and braces, markdown",
            Self::Words => "what begins a word and is followed by no letter",
        }
    }

    fn classify(token: &TokenRecord) -> Self {
        let trimmed = token.text.trim();
        let is_sign = |c: char| c.is_ascii_digit() || "+-*/=^<>%().×÷·±√π≤≥≠−".contains(c);
        let is_marked = trimmed.starts_with('\\') || trimmed.starts_with("<|") || trimmed.starts_with("</");
        if trimmed.is_empty() || is_marked || trimmed.chars().all(|c| "{}$#&_~`|".contains(c)) {
            return Self::Format;
        }
        if trimmed.chars().all(is_sign) {
            return Self::DigitsAndOperators;
        }
        let begins = token.text.starts_with(char::is_whitespace)
            || !token.context_before.chars().last().is_some_and(char::is_alphabetic);
        let ends = !token.context_after.chars().next().is_some_and(char::is_alphabetic);
        let is_word = trimmed.chars().all(|c| c.is_alphabetic() || c == '\'');
        if is_word && begins && ends { Self::Words } else { Self::TyposAndSyntax }
    }
}

/// Rows of each category that has tokens, with its three most frequent texts.
pub fn table(name: &'static str, tokens: &[&TokenRecord]) -> Option<Table> {
    if tokens.is_empty() {
        return None;
    }
    if tokens.iter().any(|token| token.category.is_some()) {
        return Some(program_table(name, tokens));
    }
    let titles = ["category", "#tokens", "#share, %", "most frequent", "which tokens"];
    let mut table = Table::new(name, &titles);
    for category in Category::ALL {
        let members: Vec<&TokenRecord> =
            tokens.iter().copied().filter(|token| Category::classify(token) == category).collect();
        let frequent = most_frequent(&members).into_iter().take(3);
        table.push(vec![
            text(category.name()),
            text(members.len().to_string()),
            text(format!("{:.1}", 100.0 * members.len() as f64 / tokens.len() as f64)),
            Cell::Tokens(frequent.map(|(text, n)| (text.to_string(), format!("{n}"))).collect()),
            text(category.rule()),
        ]);
    }
    Some(table)
}

/// Tokens of programs by what they are in the source, a column of shares for each mask, and the least likely as an example. A
/// random mask shows how frequent each category is among the tokens that a mask may take.
fn program_table(name: &'static str, tokens: &[&TokenRecord]) -> Table {
    let by_mask = |mask: MaskKind| {
        let of_mask = tokens.iter().copied().filter(move |token| token.silenced_by == Some(mask));
        (mask, of_mask.collect::<Vec<&TokenRecord>>())
    };
    let masks: Vec<(MaskKind, Vec<&TokenRecord>)> =
        MaskKind::ALL.into_iter().map(by_mask).filter(|(_, tokens)| !tokens.is_empty()).collect();
    let name_of = |mask: &MaskKind| serde_json::to_value(mask).ok()?.as_str().map(str::to_string);
    let shares = masks
        .iter()
        .map(|(mask, tokens)| format!("#{}, % of {}", name_of(mask).unwrap_or_default(), tokens.len()));
    let titles: Vec<String> = ["category".into(), "#tokens".into()]
        .into_iter()
        .chain(shares)
        .chain(["most frequent".into(), "example, the least likely".into()])
        .collect();
    let mut table = Table::new(name, &titles.iter().map(String::as_str).collect::<Vec<_>>());
    for category in TokenCategory::ALL {
        let is_member = |token: &&&TokenRecord| token.category == Some(category);
        let members: Vec<&TokenRecord> = tokens.iter().filter(is_member).copied().collect();
        let share = |(_, tokens): &(MaskKind, Vec<&TokenRecord>)| {
            let n = tokens.iter().filter(is_member).count();
            text(format!("{:.1}", 100.0 * n as f64 / tokens.len() as f64))
        };
        let frequent = most_frequent(&members).into_iter().take(3);
        let frequent = Cell::Tokens(frequent.map(|(text, n)| (text.to_string(), format!("{n}"))).collect());
        let example = members.iter().min_by(|a, b| a.logp.total_cmp(&b.logp)).map_or(text("–"), |token| {
            let TokenRecord { context_before, text, context_after, .. } = *token;
            Cell::Context(context_before.clone(), text.clone(), context_after.clone())
        });
        let head = [text(category.name()), text(members.len().to_string())];
        table.push(head.into_iter().chain(masks.iter().map(share)).chain([frequent, example]).collect());
    }
    table
}

/// Texts with their counts, most frequent first.
fn most_frequent<'a>(tokens: &[&'a TokenRecord]) -> Vec<(&'a str, usize)> {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for token in tokens {
        *counts.entry(&token.text).or_default() += 1;
    }
    let mut counts: Vec<(&str, usize)> = counts.into_iter().collect();
    counts.sort_by_key(|&(text, n)| (std::cmp::Reverse(n), text));
    counts
}

/// Tokens drawn at most.
const MAX_BARS: usize = 12;
/// Characters of a token's text next to its bar.
const MAX_LABEL: usize = 16;

/// The most frequent tokens as bars; `None` if there is none.
pub fn bars(name: &str, title: &str, what: &str, tokens: &[&TokenRecord]) -> Option<Figure> {
    let counts = most_frequent(tokens);
    if counts.is_empty() {
        return None;
    }
    let group = |&(token, n): &(&str, usize)| {
        let shown = visible(token);
        // The font of PNG files has neither sign.
        let label: String = shown.replace('␣', "·").replace('⏎', "\\n").chars().take(MAX_LABEL).collect();
        let share = 100.0 * n as f64 / tokens.len() as f64;
        let bar = Bar { value: n as f64, interval: None, hover: format!("{shown}\n{n} times, {share:.1} %") };
        BarGroup { label, bars: vec![Some(bar)] }
    };
    let groups: Vec<BarGroup> = counts.iter().take(MAX_BARS).map(group).collect();
    Some(Figure {
        name: name.into(),
        title: title.into(),
        note: format!(
            "times, of {} {what}; the {} most frequent of {} texts; · is a space, \\n a line break",
            tokens.len(),
            groups.len(),
            counts.len()
        ),
        scene: Bars { series: vec![(what.to_string(), Ink::Series(0))], groups }.draw(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use stapo_core::record::{Extra, SCHEMA};

    fn token(before: &str, text: &str, after: &str) -> TokenRecord {
        TokenRecord {
            schema: SCHEMA,
            step: 1,
            problem_id: String::new(),
            sample_idx: 0,
            token_idx: 0,
            id: 0,
            text: text.into(),
            silenced_by: None,
            category: None,
            logp: -7.0,
            entropy: 0.1,
            advantage: 1.0,
            gradient_norm: 1.0,
            context_before: before.into(),
            context_after: after.into(),
            alternatives: Vec::new(),
            extra: Extra::new(),
        }
    }

    #[test]
    fn bars_say_how_often_a_token_is_there_and_its_share() {
        let tokens = [token("", "a", ""), token("", "b", ""), token("", "a", "")];
        let figure = bars("n", "t", "w", &tokens.each_ref()).unwrap();
        let shown = format!("{figure:?}");
        assert!(shown.contains("a\\n2 times, 66.7 %") && shown.contains("b\\n1 times, 33.3 %"), "{shown}");
        assert!(bars("n", "t", "w", &[]).is_none());
    }

    #[test]
    fn tokens_have_the_category_that_their_text_and_place_give() {
        let cases = [
            ("th", "x", "n 3", Category::TyposAndSyntax),
            ("so ", "th", "en", Category::TyposAndSyntax),
            ("so", ";", " 3", Category::TyposAndSyntax),
            ("12+", "7", "=", Category::DigitsAndOperators),
            ("12", " = ", "19", Category::DigitsAndOperators),
            ("end.", "\n\n", "So", Category::Format),
            ("is ", "\\boxed", "{3}", Category::Format),
            ("3", "<|end|>", "", Category::Format),
            ("x", "</b", ">", Category::Format),
            ("x", "${", "y", Category::Format),
            ("x", "{y", "}", Category::TyposAndSyntax),
            ("12", "+x", "=", Category::TyposAndSyntax),
            ("I ", "don't", " know", Category::Words),
            ("so ", "then", "", Category::Words),
            ("so ", "3rd", " one", Category::TyposAndSyntax),
            ("and", " then", " 4", Category::Words),
        ];
        for (before, text, after, expected) in cases {
            assert_eq!(Category::classify(&token(before, text, after)), expected, "{before}[{text}]{after}");
        }
    }

    #[test]
    fn tokens_of_programs_are_counted_by_category_and_mask() {
        let silenced = |text: &str, category, mask, logp| TokenRecord {
            category: Some(category),
            silenced_by: Some(mask),
            logp,
            ..token("x = ", text, " + 1")
        };
        let tokens = [
            silenced("a", TokenCategory::Identifier, MaskKind::Spurious, -7.0),
            silenced("b", TokenCategory::Identifier, MaskKind::Spurious, -9.0),
            silenced("if", TokenCategory::Keyword, MaskKind::Spurious, -7.0),
            silenced("(", TokenCategory::Operator, MaskKind::RandomTokens, -7.0),
        ];
        let table = table("t", &tokens.iter().collect::<Vec<_>>()).unwrap();
        let titles: Vec<&str> = table.head.iter().map(|column| column.title.as_str()).collect();
        assert_eq!(titles[..4], ["category", "tokens", "spurious, % of 3", "random_tokens, % of 1"]);
        let csv = table.to_csv();
        let rows: Vec<&str> = csv.lines().collect();
        assert_eq!(rows.len(), 8, "{csv}");
        assert!(rows[1].starts_with("identifier,2,66.7,0.0,"), "{csv}");
        assert!(rows[1].contains('b') && !rows[1].ends_with('a'), "the example is the least likely: {csv}");
        assert!(rows[4].starts_with("operator,1,0.0,100.0,"), "{csv}");
        assert!(rows[7].starts_with("prose,0,0.0,0.0,"), "{csv}");
    }

    #[test]
    fn the_most_frequent_text_comes_first() {
        let tokens = [token("", "b", ""), token("", "a", ""), token("", "b", "")];
        let tokens: Vec<&TokenRecord> = tokens.iter().collect();
        assert_eq!(most_frequent(&tokens), [("b", 2), ("a", 1)]);
        assert_eq!(table("t", &tokens).unwrap().rows.len(), 4);
        assert!(bars("b", "B", "tokens", &[]).is_none());
    }
}
