//! Texts that a template shows, kept apart from the template's text: special tokens have their meaning in the latter alone.

use stapo_model::Segment;

/// Placeholders of problem, response and reference, of letters and digits alone, that occur in none of the texts.
pub(super) fn marks(texts: &[&str]) -> [String; 3] {
    let mut salt = 0;
    let stem = |salt: u64| format!("stapojudged{salt}x");
    while texts.iter().any(|text| text.contains(&stem(salt))) {
        salt += 1;
    }
    ["problem", "response", "reference"].map(|name| format!("{}{name}x", stem(salt)))
}

/// A text with the contents instead of their marks.
pub(super) fn split(text: &str, marks: &[String; 3], contents: [&str; 3]) -> Vec<Segment> {
    let mut segments = Vec::new();
    let mut rest = text;
    let first = |rest: &str| {
        let found = marks.iter().enumerate().filter_map(|(idx, mark)| Some((rest.find(mark.as_str())?, idx)));
        found.min()
    };
    while let Some((at, idx)) = first(rest) {
        segments.push(Segment::Template(rest[..at].to_string()));
        segments.push(Segment::Observation(contents[idx].to_string()));
        rest = &rest[at + marks[idx].len()..];
    }
    segments.push(Segment::Template(rest.to_string()));
    segments.retain(|segment| !matches!(segment, Segment::Template(text) if text.is_empty()));
    segments
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contents_take_the_places_of_their_marks_and_nothing_else_does() {
        let contents = ["1+1", "so 2", "2"];
        let names = marks(&contents);
        let text = format!("Q {} A {}{} end", names[1], names[0], names[1]);
        let (shown, given) =
            (|t: &str| Segment::Template(t.into()), |t: &str| Segment::Observation(t.into()));
        let expected = [shown("Q "), given("so 2"), shown(" A "), given("1+1"), given("so 2"), shown(" end")];
        assert_eq!(split(&text, &names, contents), expected);
        // A response that writes a mark is shown as it is.
        let sly = ["1+1", names[2].as_str(), "2"];
        let others = marks(&sly);
        assert!(others.iter().all(|mark| !names.contains(mark)));
        let text = format!("{}{}", others[1], others[2]);
        assert_eq!(split(&text, &others, sly), [given(&names[2]), given("2")]);
    }
}
