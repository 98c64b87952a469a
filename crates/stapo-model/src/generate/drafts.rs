//! Guesses of a sequence's next tokens, copied from texts in which its last tokens occur.

use std::collections::HashMap;

/// Texts to copy from, found by pairs of consecutive tokens.
#[derive(Debug, Default)]
pub struct DraftTexts {
    texts: Vec<Vec<u32>>,
    /// Tokens of each text that `pairs` knows.
    n_indexed: Vec<usize>,
    pairs: HashMap<[u32; 2], Vec<Occurrence>>,
}

/// A token that follows a pair: its text and its index there.
#[derive(Debug, Clone, Copy)]
struct Occurrence {
    text: u32,
    next: u32,
}

/// What followed an occurrence, and how much its context agrees with the sequence.
struct Continuation<'a> {
    tokens: &'a [u32],
    weight: u32,
}

/// Occurrences of a pair that are looked at, the latest first.
const MOST_OCCURRENCES: usize = 32;
/// Tokens in front of an occurrence that are compared.
const LONGEST_MATCH: usize = 16;
/// The weight of everything that no text says.
const UNSEEN_WEIGHT: u32 = 4;

impl DraftTexts {
    /// Begins a text and returns its number.
    pub fn begin(&mut self, tokens: &[u32]) -> usize {
        self.texts.push(tokens.to_vec());
        self.n_indexed.push(0);
        self.texts.len() - 1
    }

    pub fn extend(&mut self, text: usize, tokens: impl IntoIterator<Item = u32>) {
        self.texts[text].extend(tokens);
    }

    pub fn n_tokens(&self) -> usize {
        self.texts.iter().map(Vec::len).sum()
    }

    /// Makes tokens that were added findable, at most `budget`, which is lowered by their number.
    pub fn index(&mut self, budget: &mut usize) {
        for (number, (text, n_indexed)) in self.texts.iter().zip(&mut self.n_indexed).enumerate() {
            let end = text.len().min(*n_indexed + *budget);
            *budget -= end - *n_indexed;
            for next in (*n_indexed).max(2)..end {
                let pair = [text[next - 2], text[next - 1]];
                let occurrence = Occurrence { text: number as u32, next: next as u32 };
                self.pairs.entry(pair).or_default().push(occurrence);
            }
            *n_indexed = end;
        }
    }

    fn continuations<'a>(&'a self, past: &'a [u32]) -> impl Iterator<Item = Continuation<'a>> {
        let pair = past.last_chunk::<2>();
        let found = pair.and_then(|pair| self.pairs.get(pair)).map_or(&[][..], Vec::as_slice);
        found.iter().rev().take(MOST_OCCURRENCES).map(|occurrence| {
            let (before, tokens) = self.texts[occurrence.text as usize].split_at(occurrence.next as usize);
            let agrees = |(a, b): &(&u32, &u32)| a == b;
            let reversed = before.iter().rev().zip(past.iter().rev());
            let n_common = reversed.take(LONGEST_MATCH).take_while(agrees).count() as u32;
            Continuation { tokens, weight: n_common * n_common }
        })
    }
}

/// The likeliest tokens after `past`, at most `max_tokens`: token by token what most of the best matching texts say, as
/// long as the chance that all of it is right is estimated at no less than `least_chance`.
pub fn draft(sources: &[&DraftTexts], past: &[u32], max_tokens: usize, least_chance: f64) -> Vec<u32> {
    let n_past = past.len().min(LONGEST_MATCH);
    let mut known = past[past.len() - n_past..].to_vec();
    let mut chance = 1.0;
    while known.len() < n_past + max_tokens {
        let before = known.len();
        let copied = known.clone();
        let mut ways: Vec<Continuation> =
            sources.iter().flat_map(|source| source.continuations(&copied)).collect();
        // The texts are searched again only where those found have ended.
        while known.len() < n_past + max_tokens && !ways.is_empty() {
            let (token, weight, total) = vote(&ways);
            chance *= f64::from(weight) / f64::from(total + UNSEEN_WEIGHT);
            if chance < least_chance {
                return known.split_off(n_past);
            }
            known.push(token);
            ways.retain(|way| way.tokens[0] == token && way.tokens.len() > 1);
            for way in &mut ways {
                way.tokens = &way.tokens[1..];
            }
        }
        if known.len() == before {
            break;
        }
    }
    known.split_off(n_past)
}

/// The next token with the most weight, the first among equals, its weight, and the weight of all.
fn vote(ways: &[Continuation]) -> (u32, u32, u32) {
    let mut votes: Vec<(u32, u32)> = Vec::new();
    for way in ways {
        match votes.iter_mut().find(|(token, _)| *token == way.tokens[0]) {
            Some((_, weight)) => *weight += way.weight,
            None => votes.push((way.tokens[0], way.weight)),
        }
    }
    let total = votes.iter().map(|(_, weight)| weight).sum();
    let (token, weight) = votes.into_iter().rev().max_by_key(|(_, weight)| *weight).unwrap_or_default();
    (token, weight, total)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(all: &[&[u32]]) -> DraftTexts {
        let mut texts = DraftTexts::default();
        for text in all {
            texts.begin(text);
        }
        texts.index(&mut usize::MAX.clone());
        texts
    }

    #[test]
    fn a_draft_is_what_most_of_the_best_matching_texts_say() {
        let siblings = texts(&[&[1, 2, 3, 4, 5, 9], &[1, 2, 3, 4, 6], &[1, 2, 3, 4, 6, 7], &[8, 3, 4, 5]]);
        assert_eq!(draft(&[&siblings], &[1, 2, 3, 4], 8, 0.01), [6, 7]);
        // A context that agrees further counts for more than two that agree less.
        assert_eq!(draft(&[&siblings], &[8, 3, 4], 1, 0.01), [5]);
        assert_eq!(draft(&[&siblings], &[1, 2, 3, 4], 1, 0.01), [6]);
        assert_eq!(draft(&[&siblings], &[1, 2, 3, 4], 8, 0.9), [0; 0]);
        assert_eq!(draft(&[&siblings], &[7, 7], 8, 0.01), [0; 0]);
        assert_eq!(draft(&[&siblings], &[4], 8, 0.01), [0; 0]);
    }

    #[test]
    fn a_loop_is_drafted_beyond_the_end_of_its_text() {
        let past = [1, 2, 3, 1, 2, 3, 1, 2];
        assert_eq!(draft(&[&texts(&[&past])], &past, 7, 0.01), [3, 1, 2, 3, 1, 2, 3]);
    }

    #[test]
    fn tokens_are_found_once_they_are_indexed() {
        let mut texts = DraftTexts::default();
        let text = texts.begin(&[5, 6]);
        texts.extend(text, [7, 8]);
        assert_eq!(draft(&[&texts], &[5, 6], 3, 0.01), [0; 0]);
        let mut budget = 3;
        texts.index(&mut budget);
        assert_eq!((budget, draft(&[&texts], &[5, 6], 3, 0.01)), (0, vec![7, 8]));
        assert_eq!(draft(&[&texts], &[6, 7], 3, 0.01), [0; 0]);
        texts.index(&mut 9);
        assert_eq!(draft(&[&texts], &[6, 7], 3, 0.01), [8]);
        assert_eq!(texts.n_tokens(), 4);
    }
}
