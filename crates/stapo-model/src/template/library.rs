//! What a template may call: filters, tests, functions and methods, each paid for.

use super::json::to_json;
use super::meter::Meter;
use super::namespace::Namespace;
use super::price;
use super::{date, guard};
use minijinja::value::{DynObject, Kwargs, Object, ObjectRepr, Rest, Value, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, ErrorKind, State, UndefinedBehavior, escape_formatter};
use minijinja::{filters, functions, tests};
use std::fmt;
use std::sync::Arc;

/// Marks an error that the template itself raised.
pub(super) const RAISED: &str = "raised: ";

pub(super) fn install(environment: &mut Environment<'_>, meter: &Arc<Meter>) {
    install_guards(environment, meter);
    install_filters(environment, meter);
    install_tests(environment, meter);
    install_functions(environment, meter);
    let paid = meter.clone();
    environment.set_unknown_method_callback(move |state, value, method, args| {
        let operands: Vec<Value> = [value].into_iter().chain(args).cloned().collect();
        paid.charge(price::of_method(method, &operands))?;
        let result = minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args)?;
        paid.settled(result)
    });
    let paid = meter.clone();
    environment.set_formatter(move |output, state, value| {
        if value.is_undefined() && state.undefined_behavior() == UndefinedBehavior::Strict {
            return Err(ErrorKind::UndefinedError.into());
        }
        paid.charge_whole(value)?;
        escape_formatter(output, state, value)
    });
}

/// A function that a template or a guard calls.
struct Function<F>(Arc<Meter>, F);

impl<F> fmt::Debug for Function<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("<function>")
    }
}

impl<F> Object for Function<F>
where
    F: Fn(&Meter, &[Value]) -> Result<Value, Error> + Send + Sync + 'static,
{
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn call(self: &Arc<Self>, _: &mut State<'_, '_>, operands: &[Value]) -> Result<Value, Error> {
        self.1(&self.0, operands)
    }
}

fn install_guards(environment: &mut Environment<'_>, meter: &Arc<Meter>) {
    type Guard = fn(&Meter, &[Value]) -> Result<Value, Error>;
    // Unpacking a list puts its last item on the stack first.
    fn back(operands: &[Value]) -> Value {
        operands.iter().rev().cloned().collect()
    }
    let guards: [(&str, Guard); 6] = [
        (guard::WHOLE, |meter, operands| {
            operands.iter().try_for_each(|operand| meter.charge_whole(operand))?;
            Ok(back(operands))
        }),
        (guard::FLAT, |meter, operands| {
            operands.iter().try_for_each(|operand| meter.charge_flat(operand))?;
            Ok(back(operands))
        }),
        (guard::REPEAT, |meter, operands| {
            meter.charge(price::of_repetition(operands))?;
            Ok(back(operands))
        }),
        (guard::SETTLE, |meter, operands| meter.settled(only(operands)?)),
        (guard::JOINED, |meter, operands| {
            let sum = meter.settled(only(operands)?)?;
            if sum.kind() == ValueKind::Seq && !sum.is_tuple() { meter.list(&sum) } else { Ok(sum) }
        }),
        (guard::ASSIGN, |_, operands| {
            let [value, target, name] = operands else { return Err(ErrorKind::MissingArgument.into()) };
            let Some(namespace) = target.downcast_object_ref::<Namespace>() else {
                let problem = format!("can only assign to namespaces, not {}", target.kind());
                return Err(Error::new(ErrorKind::InvalidOperation, problem));
            };
            namespace.attributes().insert(name.to_string(), value.clone());
            Ok(Value::UNDEFINED)
        }),
    ];
    for (name, guard) in guards {
        environment.add_global(name, Value::from_object(Function(meter.clone(), guard)));
    }
}

fn only(operands: &[Value]) -> Result<Value, Error> {
    let [operand, ..] = operands else { return Err(ErrorKind::MissingArgument.into()) };
    Ok(operand.clone())
}

/// The filters of Jinja that need no clock, no random numbers and no other template.
fn install_filters(environment: &mut Environment<'_>, meter: &Arc<Meter>) {
    let filters: [(&'static str, Value); 45] = [
        ("abs", Value::from_function(filters::abs)),
        ("attr", Value::from_function(filters::attr)),
        ("batch", Value::from_function(filters::batch)),
        ("bool", Value::from_function(filters::bool)),
        ("capitalize", Value::from_function(filters::capitalize)),
        ("count", Value::from_function(filters::length)),
        ("d", Value::from_function(filters::default)),
        ("default", Value::from_function(filters::default)),
        ("dictsort", Value::from_function(filters::dictsort)),
        ("e", Value::from_function(filters::escape)),
        ("escape", Value::from_function(filters::escape)),
        ("first", Value::from_function(filters::first)),
        ("float", Value::from_function(filters::float)),
        ("format", Value::from_function(filters::format)),
        ("groupby", Value::from_function(filters::groupby)),
        ("indent", Value::from_function(filters::indent)),
        ("int", Value::from_function(filters::int)),
        ("items", Value::from_function(filters::items)),
        ("join", Value::from_function(filters::join)),
        ("last", Value::from_function(filters::last)),
        ("length", Value::from_function(filters::length)),
        ("lines", Value::from_function(filters::lines)),
        ("list", Value::from_function(filters::list)),
        ("lower", Value::from_function(filters::lower)),
        ("map", Value::from_function(filters::map)),
        ("max", Value::from_function(filters::max)),
        ("min", Value::from_function(filters::min)),
        ("reject", Value::from_function(filters::reject)),
        ("rejectattr", Value::from_function(filters::rejectattr)),
        ("replace", Value::from_function(filters::replace)),
        ("reverse", Value::from_function(filters::reverse)),
        ("round", Value::from_function(filters::round)),
        ("safe", Value::from_function(filters::safe)),
        ("select", Value::from_function(filters::select)),
        ("selectattr", Value::from_function(filters::selectattr)),
        ("slice", Value::from_function(filters::slice)),
        ("sort", Value::from_function(filters::sort)),
        ("split", Value::from_function(filters::split)),
        ("string", Value::from_function(filters::string)),
        ("sum", Value::from_function(filters::sum)),
        ("title", Value::from_function(filters::title)),
        ("trim", Value::from_function(filters::trim)),
        ("unique", Value::from_function(filters::unique)),
        ("upper", Value::from_function(filters::upper)),
        ("zip", Value::from_function(filters::zip)),
    ];
    for (name, filter) in filters {
        let paid = meter.clone();
        environment.add_filter(name, move |state: &mut State, operands: Rest<ValueOrKwargs>| {
            let operands = operands.into_values();
            operands.iter().try_for_each(|operand| paid.charge_whole(operand))?;
            paid.charge(price::of_filter(name, &operands))?;
            let result = filter.call(state, &operands)?;
            paid.settled(result)
        });
    }
    let paid = meter.clone();
    environment.add_filter("tojson", move |value: &Value, options: Kwargs| to_json(value, &options, &paid));
}

fn install_tests(environment: &mut Environment<'_>, meter: &Arc<Meter>) {
    let is_equal = Value::from_function(tests::is_eq);
    let tests = [
        ("boolean", Value::from_function(tests::is_boolean)),
        ("defined", Value::from_function(tests::is_defined)),
        ("divisibleby", Value::from_function(tests::is_divisibleby)),
        ("endingwith", Value::from_function(tests::is_endingwith)),
        ("eq", is_equal.clone()),
        ("equalto", is_equal.clone()),
        ("==", is_equal),
        ("even", Value::from_function(tests::is_even)),
        ("false", Value::from_function(tests::is_false)),
        ("float", Value::from_function(tests::is_float)),
        ("ge", Value::from_function(tests::is_ge)),
        (">=", Value::from_function(tests::is_ge)),
        ("greaterthan", Value::from_function(tests::is_gt)),
        ("gt", Value::from_function(tests::is_gt)),
        (">", Value::from_function(tests::is_gt)),
        ("in", Value::from_function(tests::is_in)),
        ("integer", Value::from_function(tests::is_integer)),
        ("iterable", Value::from_function(tests::is_iterable)),
        ("le", Value::from_function(tests::is_le)),
        ("<=", Value::from_function(tests::is_le)),
        ("lessthan", Value::from_function(tests::is_lt)),
        ("lower", Value::from_function(tests::is_lower)),
        ("lt", Value::from_function(tests::is_lt)),
        ("<", Value::from_function(tests::is_lt)),
        ("mapping", Value::from_function(tests::is_mapping)),
        ("ne", Value::from_function(tests::is_ne)),
        ("!=", Value::from_function(tests::is_ne)),
        ("none", Value::from_function(tests::is_none)),
        ("number", Value::from_function(tests::is_number)),
        ("odd", Value::from_function(tests::is_odd)),
        ("sameas", Value::from_function(tests::is_sameas)),
        ("sequence", Value::from_function(tests::is_sequence)),
        ("startingwith", Value::from_function(tests::is_startingwith)),
        ("string", Value::from_function(tests::is_string)),
        ("true", Value::from_function(tests::is_true)),
        ("undefined", Value::from_function(tests::is_undefined)),
        ("upper", Value::from_function(tests::is_upper)),
    ];
    for (name, test) in tests {
        let paid = meter.clone();
        environment.add_test(name, move |state: &mut State, operands: Rest<ValueOrKwargs>| {
            let operands = operands.into_values();
            match &operands[..] {
                [one] => paid.charge_flat(one)?,
                several => several.iter().try_for_each(|operand| paid.charge_whole(operand))?,
            }
            test.call(state, &operands).map(|result| result.is_true())
        });
    }
}

fn install_functions(environment: &mut Environment<'_>, meter: &Arc<Meter>) {
    for (name, function) in
        [("range", Value::from_function(functions::range)), ("dict", Value::from_function(functions::dict))]
    {
        let paid = meter.clone();
        environment.add_function(name, move |state: &mut State, operands: Rest<ValueOrKwargs>| {
            let result = function.call(state, &operands.into_values())?;
            paid.settled(result)
        });
    }
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, format!("{RAISED}{message}")))
    });
    let namespace = |meter: &Meter, operands: &[Value]| {
        let namespace = Arc::new(Namespace::default());
        for given in operands {
            let pairs = given.as_object().filter(|object| object.repr() == ObjectRepr::Map);
            let Some(pairs) = pairs.and_then(DynObject::try_iter_pairs) else {
                let problem = format!("expected a map or keyword arguments, got {}", given.kind());
                return Err(Error::new(ErrorKind::InvalidOperation, problem));
            };
            namespace.attributes().extend(pairs.map(|(name, value)| (name.to_string(), value)));
        }
        meter.keep(namespace.clone());
        meter.settled(Value::from_dyn_object(namespace))
    };
    environment.add_global("namespace", Value::from_object(Function(meter.clone(), namespace)));
}

/// Gives the templates `strftime_now` where the variables have a date, and takes it away where they have none. Templates
/// ask whether there is the function.
pub(super) fn set_date(environment: &mut Environment<'_>, meter: &Arc<Meter>, variables: &Value) {
    let today = variables.get_attr(date::TODAY).unwrap_or_default();
    if today.is_undefined() || today.is_none() {
        return environment.remove_global(date::FUNCTION);
    }
    let function = move |meter: &Meter, operands: &[Value]| date::formatted(&today, meter, operands);
    environment.add_global(date::FUNCTION, Value::from_object(Function(meter.clone(), function)));
}
