//! What a statement in words says about a number, and whether the words around it take the statement back.

use super::sentence;
use crate::text::small_number;
use crate::units;

/// Longest statement in words in which a number is looked for.
const MAX_STATEMENT_BYTES: usize = 400;
/// How much of the text before and after a statement is looked at.
const MAX_CONTEXT_BYTES: usize = 2_000;

/// Words that call a statement untrue.
const FALSEHOODS: &str = "false wrong impossible incorrect untrue mistaken mistake absurd ridiculous nonsense \
    contradiction contradictory contradicts fallacy fallacious invalid erroneous error bogus fake naive naïve tempting \
    misleading trap trick myth joke lie";
/// Words that make a statement a doubt, a guess or an assumption.
const DOUBTS: &str = "doubt doubts doubted doubtful unlikely unsure uncertain unclear perhaps maybe might possibly \
    probably supposedly allegedly presumably hypothetically hypothetical suppose supposing assume imagine pretend \
    pretending disprove disproves disproved refute refutes refuted reject rejects rejected deny denies denied disagree \
    disagrees dispute disputes wonder wonders hope hopes wish wishes kidding nobody";
const NEGATIONS: &str = "not never cannot no none neither nor hardly scarcely barely seldom rarely few";
/// What another person thinks or says is not a statement of the respondent.
const OPINIONS: &str = "think thinks thought thinking believe believes believed say says said claim claims claimed guess \
    guesses guessed argue argues argued insist insists insisted";

fn is_in(words: &str, word: &str) -> bool {
    words.split(' ').any(|known| known == word)
}

pub(super) fn is_negation(word: &str) -> bool {
    is_in(NEGATIONS, word) || word.ends_with("n't")
}

/// The beginning of a long text.
fn beginning(text: &str) -> &str {
    let end = (MAX_CONTEXT_BYTES..text.len()).find(|at| text.is_char_boundary(*at));
    &text[..end.unwrap_or(text.len())]
}

/// The end of a long text.
fn ending(text: &str) -> &str {
    let start = text.len().saturating_sub(MAX_CONTEXT_BYTES);
    let start = (start..text.len()).find(|at| text.is_char_boundary(*at));
    &text[start.unwrap_or(text.len())..]
}

/// The words of a text in small letters, without the signs around them.
fn words_of(text: &str) -> String {
    let text = text.to_lowercase().replace('’', "'");
    let words = text.split_whitespace().map(|word| word.trim_matches(|c: char| !c.is_alphanumeric()));
    words.filter(|word| !word.is_empty()).collect::<Vec<_>>().join(" ")
}

/// What a line that is one statement in words says: 34 for "The largest n is 34.", 3 hours for "She left 3 hours ago."
/// The whole line, where the statement is denied or doubted.
pub(super) fn stated_in(line: &str) -> &str {
    let first = line.split(' ').next().unwrap_or("");
    if first.len() < 2 || !first.bytes().all(|b| b.is_ascii_alphabetic()) {
        return line;
    }
    let statement = sentence(line);
    if is_retracted(&line[statement.len()..]) {
        return line;
    }
    match statement.split_once(" is ") {
        Some((head, rest)) if !rest.contains(" is ") && !is_doubted(head) => rest.trim(),
        Some(_) => line,
        None => only_number(statement).unwrap_or(line),
    }
}

/// Whether the words before "is" make a statement an assumption, or deny it: "Suppose n is", "The wrong sum is".
fn is_doubted(head: &str) -> bool {
    let text = words_of(beginning(head));
    let words: Vec<&str> = text.split(' ').collect();
    let is_article = |word: &str| matches!(word, "the" | "a" | "an" | "one");
    words.iter().enumerate().any(|(i, word)| {
        let is_claim = matches!(words.get(i + 1), Some(&"that" | &"to"));
        let is_attribute = i == 1 && is_article(words[0]);
        is_in(DOUBTS, word) || (is_in(FALSEHOODS, word) && (i == 0 || is_claim || is_attribute))
    }) || (is_opinion(&words) && !words.contains(&"who"))
        || (words.iter().any(|word| is_negation(word)) && words.iter().any(|word| is_in(OPINIONS, word)))
}

/// Whether the words name what another person than the respondent thinks.
fn is_opinion(words: &[&str]) -> bool {
    let is_own = |word: &&str| matches!(*word, "i" | "we" | "i'd" | "we'd" | "i'll" | "my" | "our");
    words.iter().any(|word| is_in(OPINIONS, word)) && !words.iter().any(is_own)
}

/// The number of a statement in words, with the noun after it. `None` if the statement holds anything else than words
/// and one number, or a word that denies, doubts, bounds or changes the number.
fn only_number(statement: &str) -> Option<&str> {
    if statement.len() > MAX_STATEMENT_BYTES {
        return None;
    }
    let mut number: Option<(usize, usize)> = None;
    let mut noun_end = None;
    let mut start = 0;
    for word in statement.split(' ') {
        let end = start + word.trim_end_matches([',', ';', ':']).len();
        let bare = &statement[start..end];
        if bare.contains(|c: char| c.is_ascii_digit()) {
            let is_numeral = bare.bytes().all(|b| b.is_ascii_digit() || b".,/%$\\-".contains(&b));
            if !is_numeral || number.is_some() {
                return None;
            }
            number = Some((start, end));
        } else if !bare.chars().all(|c| c.is_alphabetic() || matches!(c, '\'' | '’' | '-')) || bends(bare) {
            return None;
        } else if let Some((_, number_end)) = number
            && start == number_end + 1
        {
            noun_end = Some(end).filter(|_| !bare.is_empty());
        }
        start += word.len() + 1;
    }
    let (number_start, number_end) = number?;
    let noun = noun_end.map_or("", |end| statement[number_end..end].trim());
    if is_operand(&statement[..number_start], noun) {
        return None;
    }
    Some(&statement[number_start..noun_end.unwrap_or(number_end)])
}

/// Whether a word of a statement may deny, doubt, bound or change the number in it.
fn bends(word: &str) -> bool {
    const WORDS: &str = "without except besides but unless if whether or either may could about approximately roughly \
        nearly almost around than least most more less fewer over under above below between up minus plus negative \
        times twice double triple half quarter dozen hundred thousand million billion squared cubed factorial wrong \
        incorrect false untrue mistaken impossible anything nothing exclude excludes excluded excluding omit omits \
        omitted omitting avoid avoids avoided avoiding forbid forbids forbidden exceed exceeds exceeded exceeding \
        surpass surpasses surpassed lack lacks lacked lacking miss misses missed mod modulo else";
    let word = word.to_lowercase().replace('’', "'");
    is_in(WORDS, &word) || is_in(DOUBTS, &word) || is_negation(&word) || small_number(&word).is_some()
}

/// Whether the words before a number make it an operand of another value, or a place in an order: "the square of 5",
/// "the prime after 5", "base 5". A preposition counts that is before the number with nothing but articles and words
/// such as "number" between them.
fn is_operand(before: &str, noun: &str) -> bool {
    const FILLERS: &str = "the a an number numbers integer integers digit digits value prime primes just only exactly \
        precisely first next";
    // After one of these nouns "of" names an amount: "a total of 5".
    const AMOUNTS: &str = "total value amount profit distance speed cost price length width height depth area volume \
        weight mass age score rate salary income capacity temperature radius diameter perimeter maximum minimum result";
    // After one of these verbs "to" is an equals sign: "comes to 5".
    const RESULTS: &str = "equal come comes came amount amounts amounted evaluate evaluates simplify simplifies \
        simplified reduce reduces sum sums converge converges tend tends";
    // After one of these verbs "out" is a part of the verb: "handed out 5 flyers".
    const OUT_VERBS: &str = "hand hands handed give gives gave pass passes passed work works worked turn turns turned \
        find finds found pay pays paid send sends sent check checked read reads";
    const PREPOSITIONS: &str = "by following preceding from per against toward towards near like unlike via succeeding \
        surrounding dividing before past beyond within until till";
    // After one of these verbs a bare number is what is left out: "we eliminated 5".
    const EXCLUSIONS: &str = "discard discards discarded eliminate eliminates eliminated ignore ignores ignored skip \
        skips skipped remove removes removed drop drops dropped";
    const FUNCTIONS: &str = "base root log logarithm ln lg sin sine cos cosine tan tangent exp sqrt square cube floor \
        ceiling reciprocal inverse opposite successor predecessor multiple multiples divisor divisors factor factors \
        follows follow precedes precede succeeds denominator numerator exponent";
    // After one of these words "in", "at", "on" and "with" say where a number is.
    const PLACES: &str = "end ends ending start starts starting begin begins beginning fail fails differ differs disagree \
        disagrees conflict conflicts contradiction exponent denominator";
    let text = words_of(before);
    let words: Vec<&str> = text.split(' ').collect();
    let n_kept = words.iter().rposition(|word| !is_in(FILLERS, word)).map_or(0, |last| last + 1);
    let Some((last, head)) = words[..n_kept].split_last() else { return false };
    let verb = head.last().copied().unwrap_or("");
    match *last {
        "of" => !is_in(AMOUNTS, verb) || head.contains(&"absolute"),
        "in" | "at" | "on" | "with" => noun.is_empty() && is_in(PLACES, verb),
        "to" => !is_in(RESULTS, verb),
        "out" => !is_in(OUT_VERBS, verb),
        // "after 5 hours" is a time.
        "after" => !units::is_time(noun),
        word => {
            is_in(PREPOSITIONS, word)
                || is_in(FUNCTIONS, word)
                || (noun.is_empty() && is_in(EXCLUSIONS, word))
        }
    }
}

/// Whether the words before "answer is" take the statement back or are about something else: "I don't think the", "Suppose
/// the", "An incorrect", "Twice the".
pub(super) fn is_denied(before: &str) -> bool {
    let before = ending(before);
    let sentence = &before[sentence_start(before)..];
    let marks = [',', ';', ':', '—', '–'];
    let mut clause = words_of(sentence.rsplit(marks).next().unwrap_or(""));
    // "It is false, then, that the answer is 5": the clause hangs on the words before it.
    if matches!(clause.split(' ').next(), Some("that" | "whether" | "nor")) {
        clause = words_of(sentence.rsplit([';', ':']).next().unwrap_or(""));
    }
    let words: Vec<&str> = clause.split(' ').collect();
    let all_has = |known: &str| words.iter().any(|word| is_in(known, word));
    let thinks = all_has("think believe sure certain true say claim know convinced");
    if all_has("doubt doubtful unlikely") || (words.iter().any(|word| is_negation(word)) && thinks) {
        return true;
    }
    // After "so" a conclusion begins, whatever was said before it.
    let is_conclusion = |i: &usize| {
        matches!(words[*i], "so" | "therefore" | "thus" | "hence")
            && words.get(i + 1) != Some(&"that")
            && (*i == 0 || words[i - 1] != "that")
    };
    let conclusion = (0..words.len()).rev().find(is_conclusion);
    let start = conclusion.map_or(0, |i| i + 1);
    // "No the answer is 5" corrects what was said before.
    let start = if words[start..].starts_with(&["no", "the"]) { start + 1 } else { start };
    let words = &words[start..];
    let opens_assumption = words_of(sentence).split(' ').next().is_some_and(|first| {
        matches!(first, "suppose" | "assume" | "imagine" | "pretend") && conclusion.is_none()
    });
    let concludes = words.first() == Some(&"then");
    let is_against = |word: &&str| is_in(FALSEHOODS, word) || is_in(DOUBTS, word) || is_negation(word);
    (opens_assumption && !concludes)
        || words.iter().any(is_against)
        || is_opinion(words)
        || is_another_answer(words)
}

/// Whether the words right before "answer is" make it another answer or a function of the answer: "the previous", "half
/// the", "if the".
fn is_another_answer(words: &[&str]) -> bool {
    const ATTRIBUTES: &str = "previous earlier old former prior original initial alternative other another opposite \
        reverse obvious intuitive common popular typical usual rough";
    const BEFORE: &str = "of than twice half double triple times minus plus by from to if whether unless when until \
        till mod modulo be";
    let n = words.len();
    let is_other = |word: &str| matches!(word, "his" | "her" | "their");
    let is_determiner = |i: &usize| {
        matches!(words[*i], "the" | "a" | "an" | "my" | "our" | "your" | "this" | "that")
            || is_other(words[*i])
    };
    let determiner = (n.saturating_sub(4)..n).rev().find(is_determiner).unwrap_or(n);
    let before = determiner.checked_sub(1).map(|i| words[i]);
    let is_value = determiner > 1 && words[determiner - 2] == "value" && before == Some("of");
    // "To prove that the answer is 5" states a task; "Tom's answer" is another's.
    let is_task = words.first().is_some_and(|first| is_in("why how prove show verify check had", first))
        || words
            .windows(2)
            .any(|pair| matches!(pair, ["to" | "must" | "should", "prove" | "show" | "verify" | "check"]));
    let is_possessive = words[determiner.min(n.saturating_sub(2))..].iter().any(|word| {
        word.ends_with("'s") && !is_in("it's that's let's here's today's problem's question's", word)
    });
    is_task
        || is_possessive
        || words.get(determiner).is_some_and(|word| is_other(word))
        || words[n.saturating_sub(2)..].iter().any(|word| is_in(ATTRIBUTES, word))
        || (before.is_some_and(|word| is_in(BEFORE, word)) && !is_value)
}

/// Where the last sentence of `text` begins. A line break ends a sentence unless a small letter follows it.
fn sentence_start(text: &str) -> usize {
    let ends = |(at, sign): &(usize, &str)| {
        let rest = &text[at + sign.len()..];
        match *sign {
            "\n" => !rest.trim_start_matches([' ', '\t', '\r']).starts_with(char::is_lowercase),
            "." => rest.starts_with(|c: char| !c.is_alphanumeric()),
            _ => true,
        }
    };
    text.rmatch_indices(['.', '!', '?', '。', '\n']).find(ends).map_or(0, |(at, sign)| at + sign.len())
}

/// Whether the sentence after an answer takes it back: "That is incorrect.", "Contradiction.", "No."
pub(super) fn is_retracted(behind: &str) -> bool {
    const INTERJECTIONS: &str = "but however wait hmm oh sorry actually and yet well though unfortunately clearly \
        obviously alas hold on ok okay no";
    let sentences =
        beginning(behind).split(['.', '!', '?', '\n', '。']).map(words_of).filter(|text| !text.is_empty());
    for text in sentences.take(4) {
        let words: Vec<&str> = text.split(' ').collect();
        let n_calls = words.iter().take_while(|word| is_in(INTERJECTIONS, word)).count();
        let statement = &words[n_calls..];
        // "Actually, 6.": another number corrects the answer.
        let is_correction = words[..n_calls].iter().any(|word| is_in("no wait hmm actually sorry", word))
            || matches!(
                statement,
                ["correction" | "rather" | "instead", ..]
                    | ["i", "mean", ..]
                    | ["make", "that", ..]
                    | ["second", "thought", ..]
            )
            || statement.iter().any(|word| is_in("reconsider reconsidering", word));
        let has_number = statement.iter().any(|word| word.contains(|c: char| c.is_ascii_digit()));
        if is_correction && (has_number || statement.iter().any(|word| word.starts_with("reconsider"))) {
            return true;
        }
        // "Or 6.": another answer.
        if matches!(words.as_slice(), ["or", ..]) && has_number {
            return true;
        }
        if statement.is_empty() && !words.contains(&"no") {
            continue;
        }
        return statement.is_empty() || takes_back(statement);
    }
    false
}

/// Whether the words after a formula change its value, add a second one or take it back: "times the number of",
/// "and $6$", ", which is false".
pub(super) fn goes_on(behind: &str) -> bool {
    let text = words_of(beginning(behind));
    let words: Vec<&str> = text.split(' ').collect();
    let is_apart = behind.starts_with([',', ';', ':', '—', '–', '(']);
    let joins = behind
        .trim_start_matches([' ', ','])
        .strip_prefix("and ")
        .is_some_and(|next| next.starts_with(|c: char| c.is_ascii_digit() || matches!(c, '$' | '\\')));
    let statement = if words[0] == "but" { &words[1..] } else { &words[..] };
    joins
        || (!is_apart && words[0] != "but" && bends(words[0]))
        || (!statement.is_empty() && (is_in(FALSEHOODS, statement[0]) || takes_back(statement)))
}

/// Where a statement turns from the answer to a remark on it: "42, which is greater than 41", "42 because 6*7=42". The end
/// of the statement, where there is no remark or the remark takes the answer back.
pub(super) fn reason_start(statement: &str) -> usize {
    const REMARKS: [&str; 7] =
        [", which ", " because ", ", since ", " since ", ", as ", ", because ", " (because "];
    let found = REMARKS.iter().filter_map(|remark| statement.find(remark)).min();
    found.filter(|at| !goes_on(&statement[*at..])).unwrap_or(statement.len())
}

/// Whether the words of a sentence say that what was said before it is untrue.
fn takes_back(words: &[&str]) -> bool {
    const SUBJECTS: &str = "that this it which that's it's my above";
    const UNTRUE: &str = "false wrong impossible incorrect untrue mistaken mistake absurd invalid nonsense";
    let is_about = |word: &&str| is_in("answer result value claim statement number above", word);
    let names_answer = is_in(SUBJECTS, words[0]) || (words[0] == "the" && words.get(1).is_some_and(is_about));
    let is_untrue = |i: usize| {
        let next = words.get(i + 1).copied().unwrap_or("");
        is_in(UNTRUE, words[i])
            || (is_negation(words[i]) && is_in("correct right true valid possible the so it what be", next))
    };
    let is_short = words.len() <= 3 && (is_in(UNTRUE, words[0]) || matches!(words[0], "nope" | "not"));
    let owns_error =
        words[0] == "i" && words.iter().any(|word| is_in("wrong mistake mistaken error lied", word));
    words.iter().any(|word| word.starts_with("contradict"))
        || is_short
        || owns_error
        || matches!(
            words,
            ["just", "kidding", ..]
                | ["scratch" | "ignore" | "disregard" | "forget", "that" | "this" | "it", ..]
        )
        || (names_answer && (0..words.len().min(8)).any(is_untrue))
}
