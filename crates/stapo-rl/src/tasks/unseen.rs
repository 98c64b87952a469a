//! Characters of texts that a model does not see, because its tokenizer has no token for them.

use crate::error::Result;
use stapo_model::Tokenizer;
use std::collections::BTreeSet;

/// What the model does not see of some texts.
#[derive(Debug, PartialEq, Eq)]
pub struct Unseen {
    /// How many of the texts have such a character, and the first of them.
    pub n_texts: usize,
    pub first: usize,
    /// The characters, as [`listed`].
    pub characters: String,
}

/// How many characters a message lists.
const LISTED: usize = 10;

/// `'é', 'ü' and 3 more`.
pub fn listed(characters: &[char]) -> String {
    let named: Vec<String> = characters.iter().take(LISTED).map(|c| format!("{c:?}")).collect();
    let n_more = characters.len() - named.len();
    let more = if n_more > 0 { format!(" and {n_more} more") } else { String::new() };
    named.join(", ") + &more
}

/// What is not seen of texts, each given in parts; `None` if all of them are seen as they are. Every character is tried once,
/// however many texts have it.
pub fn unseen(tokenizer: &Tokenizer, texts: &[Vec<&str>]) -> Result<Option<Unseen>> {
    let mut ascii = [false; 128];
    let mut others = BTreeSet::new();
    for c in texts.iter().flatten().flat_map(|part| part.chars()) {
        match ascii.get_mut(c as usize) {
            Some(known) => *known = true,
            None => _ = others.insert(c),
        }
    }
    let ascii = (0u8..128).filter(|&c| ascii[usize::from(c)]).map(char::from);
    let lost = tokenizer.lost_characters(&ascii.chain(others).collect::<String>())?;
    let is_cut = |parts: &Vec<&str>| parts.iter().any(|part| part.contains(&lost[..]));
    let Some(first) = texts.iter().position(is_cut) else { return Ok(None) };
    let n_texts = texts.iter().filter(|parts| is_cut(parts)).count();
    Ok(Some(Unseen { n_texts, first, characters: listed(&lost) }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ten_characters_are_listed_and_the_others_counted() {
        let characters: Vec<char> = ('a'..='z').collect();
        assert_eq!(listed(&characters[..2]), "'a', 'b'");
        let ten = "'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h', 'i', 'j'";
        assert_eq!(listed(&characters[..10]), ten);
        assert_eq!(listed(&characters[..13]), format!("{ten} and 3 more"));
    }
}
