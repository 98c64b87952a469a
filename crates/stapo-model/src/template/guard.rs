//! Puts guards around the instructions of a compiled template.
//!
//! A guard before an instruction takes its operands from the stack, pays for them and puts them back; a guard after an
//! instruction replaces its result. The names of the guards are no identifiers, so no template can call or replace one.

use minijinja::machinery::{Instruction, Instructions};
use minijinja::value::Value;

/// Pays for the operands with everything in them.
pub(super) const WHOLE: &str = "<whole>";
/// Pays for the operands without what is in their items.
pub(super) const FLAT: &str = "<flat>";
/// Pays for the result of a repetition.
pub(super) const REPEAT: &str = "<repeat>";
/// Pays for a new container, and turns a lazy sequence into a list.
pub(super) const SETTLE: &str = "<settle>";
/// Turns the sum of two lists, which refers to both, into a separate list.
pub(super) const JOINED: &str = "<joined>";
/// Assigns to an attribute of a namespace: value, namespace, name.
pub(super) const ASSIGN: &str = "<assign>";

pub(super) fn guarded<'s>(plain: &Instructions<'s>, source: &'s str) -> Instructions<'s> {
    let mut out = Instructions::new(super::NAME, source);
    // The place of each old instruction, or of the guard before it, and the end.
    let mut new_indices = Vec::new();
    let mut end = 0;
    let mut idx = 0;
    while let Some(instruction) = plain.get(idx) {
        let line = plain.get_line(idx).unwrap_or(0).try_into().unwrap_or(u16::MAX);
        new_indices.push(with_guards(instruction, |new| {
            let idx = out.add_with_line(new, line);
            end = idx + 1;
            idx
        }));
        idx += 1;
    }
    new_indices.push(end);
    let mut idx = 0;
    while let Some(instruction) = out.get_mut(idx) {
        if let Some(target) = target_of(instruction) {
            *target = new_indices[*target as usize];
        }
        idx += 1;
    }
    out
}

/// The instruction that an instruction may jump to.
fn target_of<'a>(instruction: &'a mut Instruction<'_>) -> Option<&'a mut u32> {
    match instruction {
        Instruction::Iterate(target)
        | Instruction::Jump(target)
        | Instruction::JumpIfFalse(target)
        | Instruction::JumpIfFalseOrPop(target)
        | Instruction::JumpIfTrueOrPop(target)
        | Instruction::BuildMacro(_, target, _) => Some(target),
        _ => None,
    }
}

/// Adds the instruction with its guards; returns the place of the first one.
fn with_guards<'s>(instruction: &Instruction<'s>, mut add: impl FnMut(Instruction<'s>) -> u32) -> u32 {
    match instruction {
        Instruction::EmitRaw(text) => {
            // Text goes the way of values, where it is paid for.
            let first = add(Instruction::LoadConst(Value::from(*text)));
            add(Instruction::Emit);
            return first;
        }
        Instruction::SetAttr(name) => {
            let first = add(Instruction::LoadConst(Value::from(*name)));
            add(Instruction::CallFunction(ASSIGN, Some(3)));
            add(Instruction::DiscardTop);
            return first;
        }
        _ => {}
    }
    let first = before(instruction).map(|(guard, n_operands)| {
        let first = add(Instruction::CallFunction(guard, Some(n_operands)));
        add(Instruction::UnpackList(n_operands as usize));
        first
    });
    let idx = add(instruction.clone());
    if let Some(guard) = behind(instruction) {
        add(Instruction::CallFunction(guard, Some(1)));
    }
    first.unwrap_or(idx)
}

/// The guard before an instruction, and how many operands it looks at.
fn before(instruction: &Instruction) -> Option<(&'static str, u16)> {
    match instruction {
        Instruction::Mul => Some((REPEAT, 2)),
        Instruction::Add
        | Instruction::StringConcat
        | Instruction::Eq
        | Instruction::Ne
        | Instruction::Gt
        | Instruction::Gte
        | Instruction::Lt
        | Instruction::Lte
        | Instruction::In
        | Instruction::CompareAndPreserve(_) => Some((WHOLE, 2)),
        Instruction::GetItem => Some((FLAT, 2)),
        Instruction::Slice => Some((FLAT, 4)),
        Instruction::PushLoop(_) => Some((FLAT, 1)),
        Instruction::FastRecurse => Some((FLAT, 1)),
        Instruction::BuildMap(n_pairs) => Some((WHOLE, 2 * *n_pairs as u16)).filter(|_| *n_pairs > 0),
        Instruction::CallFunction(_, Some(n))
        | Instruction::CallMethod(_, Some(n))
        | Instruction::CallObject(Some(n)) => Some((WHOLE, *n)).filter(|_| *n > 0),
        _ => None,
    }
}

/// The guard after an instruction.
fn behind(instruction: &Instruction) -> Option<&'static str> {
    match instruction {
        Instruction::Add => Some(JOINED),
        Instruction::Mul
        | Instruction::Slice
        | Instruction::BuildMap(_)
        | Instruction::BuildList(_)
        | Instruction::BuildTuple(_) => Some(SETTLE),
        _ => None,
    }
}
