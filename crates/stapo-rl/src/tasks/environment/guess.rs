//! The game of the task `guess`: the policy guesses a number that only the environment knows.

use super::spec::GuessWords;
use super::{Answer, Environment, PolicyTurn, Reply};
use crate::reward::Judged;
use crate::tasks::TaskError;
use stapo_core::{Turn, Verdict};

pub(super) struct GuessGame<'a> {
    pub words: &'a GuessWords,
}

impl Environment for GuessGame<'_> {
    fn answer(&self, turns: &[PolicyTurn]) -> Result<Vec<Answer>, TaskError> {
        turns.iter().map(|turn| self.answer_turn(turn)).collect()
    }

    fn judges(&self) -> bool {
        true
    }
}

impl GuessGame<'_> {
    fn answer_turn(&self, turn: &PolicyTurn) -> Result<Answer, TaskError> {
        let hidden: i64 = turn.problem.reference.parse().map_err(|_| {
            let problem = format!(
                "the reference {:?} of {:?} is no whole number",
                turn.problem.reference, turn.problem.id
            );
            TaskError::setting("environment", problem, "kind = \"guess\" plays the task of kind \"guess\"")
        })?;
        let words = match last_number(turn.text()) {
            Some(guess) if guess == hidden => {
                let reason = format!("guessed in turn {}", turn.texts.len());
                let judged = Judged::new(Verdict::Right, Some(guess.to_string()), reason);
                return Ok(Reply::Done(vec![judged]).into());
            }
            Some(guess) if guess < hidden => &self.words.higher,
            Some(_) => &self.words.lower,
            None => &self.words.unread,
        };
        Ok(Reply::Continue(vec![Turn { role: "user".into(), content: words.clone() }]).into())
    }
}

/// The last whole number in a text. A number beyond 18 digits is none.
fn last_number(text: &str) -> Option<i64> {
    let end = text.rfind(|c: char| c.is_ascii_digit())? + 1;
    let start = text[..end]
        .rfind(|c: char| !c.is_ascii_digit())
        .map_or(0, |at| at + text[at..].chars().next().map_or(1, char::len_utf8));
    let digits = text[start..end].parse::<i64>().ok().filter(|_| end - start <= 18)?;
    // Only a minus sign that does not subtract belongs to the number.
    let before = text[..start].strip_suffix('-');
    let is_negative =
        before.is_some_and(|before| !before.ends_with(|c: char| c.is_ascii_alphanumeric() || c == ')'));
    Some(if is_negative { -digits } else { digits })
}

#[cfg(test)]
mod tests {
    use super::*;
    use stapo_core::Problem;

    #[test]
    fn the_last_whole_number_of_a_turn_is_the_guess() {
        for (text, number) in [
            ("50", Some(50)),
            ("I say 7, no: 12.", Some(12)),
            ("-3", Some(-3)),
            ("10-3", Some(3)),
            ("é9", Some(9)),
            ("", None),
            ("none", None),
            ("12345678901234567890", None),
        ] {
            assert_eq!(last_number(text), number, "{text:?}");
        }
    }

    #[test]
    fn a_game_ends_with_the_right_guess_and_answers_all_others() {
        let words = GuessWords::default();
        let game = GuessGame { words: &words };
        let problem = Problem {
            id: "guess".into(),
            earlier_turns: Vec::new(),
            prompt: "from 1 to 9".into(),
            reference: "6".into(),
        };
        let said = |text: &str| {
            let texts = [text.to_string()];
            let turn = PolicyTurn { episode: 0, problem: &problem, texts: &texts };
            game.answer(&[turn]).unwrap().remove(0).reply
        };
        for (text, observation) in [("5", "higher"), ("7", "lower"), ("?", "no number")] {
            let expected = Turn { role: "user".into(), content: observation.into() };
            assert_eq!(said(text), Reply::Continue(vec![expected]), "{text}");
        }
        let Reply::Done(judged) = said("it is 6") else { panic!("the game goes on") };
        assert_eq!((judged[0].verdict, judged[0].reason.as_str()), (Verdict::Right, "guessed in turn 1"));
    }
}
