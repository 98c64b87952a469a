//! The words of `docs/glossary.md`: a heading has a word and, after commas, its other names.

use super::Entry;

const PAGE: &str = include_str!("../../../../docs/glossary.md");

pub fn entries() -> Vec<Entry> {
    parsed(PAGE)
}

fn parsed(page: &str) -> Vec<Entry> {
    let sections = page.split("\n## ").skip(1).filter_map(|section| section.split_once('\n'));
    let entry = |(heading, text): (&str, &str)| {
        let mut names = heading.split(',').map(|name| name.trim().trim_matches('`').to_string());
        let mut entry = Entry::new("word", names.next().unwrap_or_default(), text.trim());
        entry.aliases = names.collect();
        entry
    };
    sections.map(entry).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_heading_has_a_word_and_its_other_names() {
        let found = parsed("# Glossary\nWords.\n\n## S2T, silencing\nOne.\n\nTwo.\n\n## `tau_p`\nThree.\n");
        assert_eq!((found[0].name.as_str(), found[0].text.as_str()), ("S2T", "One.\n\nTwo."));
        assert_eq!(
            (found[0].aliases.as_slice(), found[1].name.as_str()),
            (&["silencing".to_string()][..], "tau_p")
        );
    }

    #[test]
    fn every_word_has_a_text() {
        let found = entries();
        assert!(found.len() > 5, "{} words", found.len());
        assert!(found.iter().all(|entry| !entry.name.is_empty() && !entry.text.is_empty()), "{found:?}");
    }
}
