//! Jinja templates from untrusted files, rendered within bounds.
//!
//! The engine (minijinja) counts instructions, but one instruction may allocate without bound: `x ~ x` in a loop, a
//! repeated string, a filter. So every rendering does three things more:
//! - the syntax tree is checked before it is compiled (`check`): nesting, size of literals, constants;
//! - the compiled instructions are rewritten (`guard`), so that every operation that reads or makes values first pays
//!   for them from the budget of the rendering (`meter`);
//! - filters, tests, functions and methods are those of a list (`library`), and each pays for what it reads and makes.
//!
//! Rendering runs on a thread with a deep stack, which the bounds on nesting cannot exhaust.

mod check;
mod date;
mod guard;
mod json;
mod library;
mod meter;
mod namespace;
mod price;
#[cfg(test)]
mod tests;

use crate::untrusted::{Failed, on_deep_stack};
use meter::Meter;
use minijinja::machinery::{CodeGenerator, Instructions, eval, make_string_output, parse};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Value;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, UndefinedBehavior};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Longest template accepted, in bytes; published templates have up to about 30 kB.
pub const MAX_TEMPLATE_BYTES: usize = 256 << 10;
/// Deepest nesting of macros and loops at run time.
const MAX_RUN_DEPTH: usize = 200;
const NAME: &str = "template";

/// How a template is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// As Hugging Face compiles chat templates: lines that hold a block only leave no trace; an undefined variable is
    /// empty.
    Chat,
    /// Every character counts, the last line break too; an undefined variable is an error.
    Prompt,
}

/// The bounds of one rendering.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Instructions of the engine.
    pub steps: u64,
    /// Bytes that all operations together may read and make.
    pub work_bytes: u64,
    /// Bytes of the result.
    pub output_bytes: usize,
}

/// A template that was checked and compiles.
#[derive(Debug, Clone)]
pub struct Template {
    source: String,
    dialect: Dialect,
}

/// Why a template was refused, or refused to render.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    pub problem: String,
    /// Empty if there is no remedy to give.
    pub hint: &'static str,
}

impl Template {
    pub fn new(source: String, dialect: Dialect) -> Result<Self, Refused> {
        if source.len() > MAX_TEMPLATE_BYTES {
            let problem = format!("{} bytes, at most {MAX_TEMPLATE_BYTES} are accepted", source.len());
            return Err(Refused { problem, hint: "" });
        }
        let template = Self { source, dialect };
        isolated(&template.source, || compile(&template.source, dialect).map(|_| ()))?;
        Ok(template)
    }

    pub fn source(&self) -> &str {
        &self.source
    }

    /// The text that the template makes of `variables`, a map.
    pub fn render(&self, variables: &Value, limits: Limits) -> Result<String, Refused> {
        let mut texts = self.render_all(&[(variables.clone(), limits)])?;
        Ok(texts.pop().expect("one rendering gives one text"))
    }

    /// The texts of many renderings, each with its own variables and bounds. The template is compiled and the engine set
    /// up once. The first rendering that is refused refuses all.
    pub fn render_all(&self, renderings: &[(Value, Limits)]) -> Result<Vec<String>, Refused> {
        let texts = isolated(&self.source, || {
            let instructions = compile(&self.source, self.dialect)?;
            let meter = Arc::new(Meter::default());
            let mut environment = environment(self.dialect, &meter);
            let render = |(variables, limits): &(Value, Limits)| {
                meter.fill(limits.work_bytes);
                library::set_date(&mut environment, &meter, variables);
                environment.set_fuel(Some(limits.steps));
                let result = render(&environment, &instructions, variables.clone());
                // A namespace may hold itself. Emptied, it is freed.
                meter.empty_namespaces();
                result
            };
            renderings.iter().map(render).collect::<Result<Vec<String>, Error>>()
        })?;
        let bounds = renderings.iter().map(|(_, limits)| limits.output_bytes);
        if let Some((text, bound)) = texts.iter().zip(bounds).find(|(text, bound)| text.len() > *bound) {
            let problem = format!("writes {} bytes, at most {bound} are accepted", text.len());
            return Err(Refused { problem, hint: "" });
        }
        Ok(texts)
    }
}

/// Runs `work` on the deep stack. The engine panics on a few odd inputs, such as a slice backwards from a start before
/// its end; such a panic is a refusal.
fn isolated<T: Send>(source: &str, work: impl FnOnce() -> Result<T, Error> + Send) -> Result<T, Refused> {
    let refused = |problem: String| Refused { problem, hint: "" };
    match on_deep_stack(|| work().map_err(|error| refusal(&error, source))) {
        Ok(result) => result,
        Err(Failed::Panicked) => Err(refused("the template engine failed on it".into())),
        Err(Failed::NoThread(why)) => Err(refused(format!("no thread to render it: {why}"))),
    }
}

/// The guarded instructions of a template.
fn compile(source: &str, dialect: Dialect) -> Result<Instructions<'_>, Error> {
    let mut syntax = SyntaxConfig::builder();
    match dialect {
        Dialect::Chat => syntax.trim_blocks(true).lstrip_blocks(true),
        Dialect::Prompt => syntax.keep_trailing_newline(true),
    };
    let tree = parse(source, NAME, syntax.build()?)?;
    check::check(&tree)?;
    let mut generator = CodeGenerator::new(NAME, source);
    generator.compile_stmt(&tree);
    let (instructions, _) = generator.finish();
    Ok(guard::guarded(&instructions, source))
}

/// The engine with the library of a dialect; `meter` is filled before each rendering.
fn environment(dialect: Dialect, meter: &Arc<Meter>) -> Environment<'static> {
    let mut environment = Environment::empty();
    environment.set_undefined_behavior(match dialect {
        Dialect::Chat => UndefinedBehavior::Lenient,
        Dialect::Prompt => UndefinedBehavior::Strict,
    });
    environment.set_recursion_limit(MAX_RUN_DEPTH);
    library::install(&mut environment, meter);
    environment
}

fn render(environment: &Environment, instructions: &Instructions, variables: Value) -> Result<String, Error> {
    let mut text = String::new();
    let mut output = make_string_output(&mut text);
    let blocks = BTreeMap::new();
    eval(environment, instructions, variables, &blocks, &mut output, AutoEscape::None)?;
    drop(output);
    Ok(text)
}

/// The engine's error in one line, or the template's own message if the template raised one.
fn refusal(error: &Error, source: &str) -> Refused {
    let line = error.line().map(|line| format!(" (line {line})")).unwrap_or_default();
    let detail = error.detail().unwrap_or_default();
    if let Some(message) = detail.strip_prefix(library::RAISED) {
        return Refused { problem: format!("refuses the conversation: {message}"), hint: "" };
    }
    if lacks_date(error, source) {
        let problem = format!("{}: {} is unknown{line}", ErrorKind::UnknownFunction, date::FUNCTION);
        return Refused { problem, hint: date::HINT };
    }
    let hint = match error.kind() {
        ErrorKind::OutOfFuel => {
            "it does more work than any conversation needs; do not trust the files it came with"
        }
        ErrorKind::InvalidOperation if detail.starts_with(date::TODAY) => date::HINT,
        ErrorKind::InvalidOperation if detail.starts_with(date::FUNCTION) => date::LETTERS_HINT,
        _ => "",
    };
    let detail = if detail.is_empty() { String::new() } else { format!(": {detail}") };
    Refused { problem: format!("{}{detail}{line}", error.kind()), hint }
}

/// Whether the template called the function of the date, which is not there. In a macro the engine does not name what it
/// cannot call, so the line of the template tells.
fn lacks_date(error: &Error, source: &str) -> bool {
    let detail = error.detail().unwrap_or_default();
    let line = error.line().and_then(|line| source.lines().nth(line.checked_sub(1)?)).unwrap_or_default();
    match error.kind() {
        ErrorKind::UnknownFunction => detail.contains(date::FUNCTION),
        ErrorKind::InvalidOperation => {
            detail.ends_with("undefined is not callable") && line.contains(date::FUNCTION)
        }
        _ => false,
    }
}
