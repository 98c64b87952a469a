//! A small reader of Rust and CUDA source text: code without prose, functions with their sizes, words.

/// The text with comments, string literals and character literals blanked out. Line breaks stay, so that lines can be
/// counted.
pub fn code_only(text: &str) -> String {
    let mut code = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        match prose_len(rest) {
            0 => {
                code.push(c);
                rest = &rest[c.len_utf8()..];
            }
            n => {
                code.push(' ');
                code.extend(rest[..n].chars().filter(|c| *c == '\n'));
                rest = &rest[n..];
            }
        }
    }
    code
}

/// Bytes of the comment or literal that `text` begins with; 0 for anything else.
fn prose_len(text: &str) -> usize {
    let through =
        |from: usize, end: &str| text[from..].find(end).map_or(text.len(), |at| from + at + end.len());
    if text.starts_with("//") {
        return text.find('\n').unwrap_or(text.len());
    }
    if text.starts_with("/*") {
        return through(2, "*/");
    }
    if let Some(hashes) = raw_string_hashes(text) {
        return through(2 + hashes, &format!("\"{}", "#".repeat(hashes)));
    }
    if let Some(quoted) = text.strip_prefix('"') {
        return 1 + quoted_len(quoted, '"');
    }
    // 'a' and '\n' are characters; 'a without a closing quote is a lifetime.
    let mut chars = text.chars();
    match (chars.next(), chars.next(), chars.next()) {
        (Some('\''), Some('\\'), _) => 1 + quoted_len(&text[1..], '\''),
        (Some('\''), Some(c), Some('\'')) => 2 + c.len_utf8(),
        _ => 0,
    }
}

/// Bytes up to and including the first `quote` that no backslash escapes.
fn quoted_len(text: &str, quote: char) -> usize {
    let mut is_escaped = false;
    let end = text.find(|c| {
        let closes = c == quote && !is_escaped;
        is_escaped = c == '\\' && !is_escaped;
        closes
    });
    end.map_or(text.len(), |end| end + 1)
}

fn raw_string_hashes(text: &str) -> Option<usize> {
    let hashes = text.strip_prefix('r')?.chars().take_while(|c| *c == '#').count();
    text[1 + hashes..].starts_with('"').then_some(hashes)
}

fn is_word_char(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

pub fn has_word(code: &str, word: &str) -> bool {
    code.contains(word) && code.split(|c| !is_word_char(c)).any(|part| part == word)
}

/// A function with a body, or a declaration without one.
#[derive(Debug, PartialEq)]
pub struct Function {
    pub name: String,
    /// From the name's line to the closing brace; 1 without a body.
    pub n_lines: usize,
    /// `self` is not counted.
    pub n_arguments: usize,
    /// A CUDA kernel.
    pub is_kernel: bool,
}

/// The functions of Rust code from [`code_only`].
pub fn rust_functions(code: &str) -> Vec<Function> {
    let starts = code.match_indices("fn ").filter(|(at, _)| !code[..*at].ends_with(is_word_char));
    starts.filter_map(|(at, found)| rust_function(&code[at + found.len()..])).collect()
}

/// The function whose name `text` begins with.
fn rust_function(text: &str) -> Option<Function> {
    let name: String = text.chars().take_while(|c| is_word_char(*c)).collect();
    let mut at = name.len();
    if text[at..].starts_with('<') {
        at += group_len(&text[at..]);
    }
    if name.is_empty() || !text[at..].starts_with('(') {
        return None;
    }
    let after = at + group_len(&text[at..]);
    let is_self = |argument: &&str| has_word(argument.split(':').next().unwrap_or(""), "self");
    let arguments = list_items(&text[at + 1..after - 1]);
    let n_arguments = arguments.iter().filter(|argument| !is_self(argument)).count();
    Some(Function { name, n_lines: body_end(text, after).1, n_arguments, is_kernel: false })
}

/// Where the body that follows a signature ends, and the lines up to there.
fn body_end(text: &str, signature_end: usize) -> (usize, usize) {
    let mut at = signature_end;
    while let Some(c) = text[at..].chars().next() {
        match c {
            '{' => at += group_len(&text[at..]),
            // An array in the return type holds a semicolon of its own.
            '(' | '[' => {
                at += group_len(&text[at..]);
                continue;
            }
            ';' => {}
            c => {
                at += c.len_utf8();
                continue;
            }
        }
        break;
    }
    (at, 1 + text[..at].matches('\n').count())
}

/// Bytes of the bracketed group that `text` begins with. The arrows `->` and `=>` close nothing.
fn group_len(text: &str) -> usize {
    // Inside braces `<` and `>` compare numbers; elsewhere they are brackets of types.
    let is_block = text.starts_with('{');
    let mut depth = 0usize;
    let mut before = ' ';
    for (at, c) in text.char_indices() {
        match c {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth -= 1,
            '<' if !is_block => depth += 1,
            '>' if !is_block && !matches!(before, '-' | '=') => depth -= 1,
            _ => {}
        }
        before = c;
        if depth == 0 {
            return at + c.len_utf8();
        }
    }
    text.len()
}

/// The items of a comma-separated list, brackets inside an item kept whole.
fn list_items(list: &str) -> Vec<&str> {
    let mut items = Vec::new();
    let mut start = 0;
    let mut at = 0;
    while let Some(c) = list[at..].chars().next() {
        match c {
            '(' | '[' | '{' | '<' => at += group_len(&list[at..]),
            ',' => {
                items.push(&list[start..at]);
                at += 1;
                start = at;
            }
            c => at += c.len_utf8(),
        }
    }
    items.push(&list[start..]);
    items.into_iter().filter(|item| !item.trim().is_empty()).collect()
}

/// The functions of CUDA code from [`code_only`]: a brace after a parenthesis opens the body of one.
pub fn cuda_functions(code: &str) -> Vec<Function> {
    let code = without_directives(code);
    let mut found = Vec::new();
    let mut header = 0;
    let mut at = 0;
    while let Some(c) = code[at..].chars().next() {
        let opens = c == '{' && code[header..at].contains('(');
        if opens {
            let text = &code[header..];
            let skipped = text.len() - text.trim_start().len();
            let (end, n_lines) = body_end(&text[skipped..], at - header - skipped);
            found.extend(cuda_function(code[header..at].trim(), n_lines));
            at = header + skipped + end;
            header = at;
            continue;
        }
        at += c.len_utf8();
        if matches!(c, ';' | '{' | '}') {
            header = at;
        }
    }
    found
}

/// A function by what stands before its body; the last pair of parentheses holds the parameters.
fn cuda_function(header: &str, n_lines: usize) -> Option<Function> {
    let mut open = 0;
    let mut at = 0;
    while let Some(c) = header[at..].chars().next() {
        if c == '(' {
            open = at;
            at += group_len(&header[at..]);
        } else {
            at += c.len_utf8();
        }
    }
    let close = open + group_len(&header[open..]);
    let before = header[..open].trim_end();
    let name = before.rsplit(|c| !is_word_char(c)).next().filter(|name| !name.is_empty())?.to_string();
    let is_kernel = has_word(before, "KERNEL") || has_word(before, "__global__");
    Some(Function { name, n_lines, n_arguments: list_items(&header[open + 1..close - 1]).len(), is_kernel })
}

/// Blanks out preprocessor directives with the lines they continue on.
fn without_directives(code: &str) -> String {
    let mut out = String::with_capacity(code.len());
    let mut is_directive = false;
    for line in code.lines() {
        is_directive = is_directive || line.trim_start().starts_with('#');
        if !is_directive {
            out.push_str(line);
        }
        out.push('\n');
        is_directive = is_directive && line.ends_with('\\');
    }
    out
}
