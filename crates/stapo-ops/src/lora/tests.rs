use super::*;
use crate::testing::{
    Tensors, assert_gradients, assert_same_on_all_devices, bits, cotangents, device,
    project as project_outputs, upload, values, weight,
};

/// Three modules, of which the second has no adapter.
const RANK: usize = 3;
const INPUTS: usize = 37;
const WIDTHS: [usize; 3] = [40, 9, 33];

fn modules() -> [Module; 2] {
    let outputs = WIDTHS.iter().sum();
    let band = |start, len| Band { start, len, of: outputs };
    let hidden = |start| Band { start, len: RANK, of: pitch(2, RANK) };
    [
        Module { scale: SCALE, hidden: hidden(0), outputs: band(0, WIDTHS[0]) },
        Module { scale: SCALE, hidden: hidden(RANK), outputs: band(WIDTHS[0] + WIDTHS[1], WIDTHS[2]) },
    ]
}

const SCALE: f64 = 0.3;

/// Inputs: x, a, b of both modules, y before the term.
fn inputs<T: Float>(tokens: usize) -> Tensors<T> {
    let outputs: usize = WIDTHS.iter().sum();
    vec![
        values(1, tokens * INPUTS),
        values(2, 2 * RANK * INPUTS),
        values(3, WIDTHS[0] * RANK),
        values(4, WIDTHS[2] * RANK),
        values(5, tokens * outputs),
    ]
}

/// The factors among `inputs`, on the device.
fn factors<T: Float>(device: &Device, inputs: &Tensors<T>) -> (Weight<T>, [Weight<T>; 2]) {
    let a = weight(device, 2 * RANK, INPUTS, &inputs[1]);
    let b =
        [(WIDTHS[0], 2), (WIDTHS[2], 3)].map(|(width, place)| weight(device, width, RANK, &inputs[place]));
    (a, b)
}

/// hidden and y.
fn forward_of<T: Float>(device: &Device, tokens: usize, inputs: &Tensors<T>) -> Tensors<T> {
    let x = upload(device, &inputs[0]);
    let (a, b) = factors(device, inputs);
    let modules = modules();
    let adapter = Adapter { a: &a, b: b.iter().collect(), modules: &modules };
    let mut hidden = device.zeros(tokens * pitch(2, RANK)).unwrap();
    let mut input = Input::Apart { x: x.view(), hidden: hidden.view_mut() };
    project(device, tokens, &adapter, &mut input);
    let mut y = upload(device, &inputs[4]);
    expand(device, tokens, &adapter, hidden.view(), y.view_mut());
    vec![hidden.view().to_vec(), y.view().to_vec()]
}

/// Gradients of a, of both b, and of x, given that of y.
fn backward_of<T: Float>(device: &Device, tokens: usize, inputs: &Tensors<T>, d_y: &[T]) -> Tensors<T> {
    let hidden = upload(device, &forward_of(device, tokens, inputs)[0]);
    let (x, d_y) = (upload(device, &inputs[0]), upload(device, d_y));
    let (a, b) = factors(device, inputs);
    let modules = modules();
    let adapter = Adapter { a: &a, b: b.iter().collect(), modules: &modules };
    let mut d_hidden = device.zeros(tokens * pitch(2, RANK)).unwrap();
    let mut gradient = Input::Apart { x: d_y.view(), hidden: d_hidden.view_mut() };
    backward_hidden(device, tokens, &adapter, &mut gradient);
    let mut d_b = [2, 3].map(|place: usize| device.zeros(inputs[place].len()).unwrap());
    let mut d_a = device.zeros(2 * RANK * INPUTS).unwrap();
    let to = FactorGradients {
        b: d_b.iter_mut().map(|d_b| (d_b.view_mut(), Write::Add)).collect(),
        a: Some((d_a.view_mut(), Write::Add)),
    };
    let [hidden, of_hidden] = [hidden.view(), d_hidden.view()].map(Hidden::apart);
    let saved = Backward { x: x.view(), d_y: d_y.view(), hidden, d_hidden: of_hidden };
    backward_factors(device, tokens, &adapter, saved, to);
    let mut d_x = device.zeros(tokens * INPUTS).unwrap();
    backward_input(device, tokens, &adapter, d_hidden.view(), d_x.view_mut());
    let [first, second] = d_b;
    [d_a, first, second, d_x].iter().map(|gradient| gradient.view().to_vec()).collect()
}

#[test]
fn the_term_continues_the_chain_of_the_product_and_leaves_other_columns_alone() {
    let tokens = 29;
    let inputs = inputs::<f32>(tokens);
    let found = forward_of(&device(), tokens, &inputs);
    let mut expected = inputs[4].clone();
    let outputs: usize = WIDTHS.iter().sum();
    for (module, b) in modules().into_iter().zip(&inputs[2..4]) {
        for t in 0..tokens {
            for n in 0..module.outputs.len {
                let y = &mut expected[t * outputs + module.outputs.start + n];
                for k in 0..RANK {
                    let row = (module.hidden.start + k) * INPUTS;
                    let x = &inputs[0][t * INPUTS..][..INPUTS];
                    let chain = x.iter().zip(&inputs[1][row..]).fold(0f32, |sum, (x, a)| x.mul_add(*a, sum));
                    *y = (chain * SCALE as f32).mul_add(b[n * RANK + k], *y);
                }
            }
        }
    }
    assert_eq!(bits(&found[1]), bits(&expected));
}

#[test]
fn a_second_factor_of_zeros_changes_no_bit() {
    let mut inputs = inputs::<f32>(7);
    inputs[2].fill(0.0);
    inputs[3].fill(0.0);
    assert_eq!(bits(&forward_of(&device(), 7, &inputs)[1]), bits(&inputs[4]));
}

#[test]
fn rows_do_not_depend_on_the_batch_nor_results_on_the_device() {
    let outputs: usize = WIDTHS.iter().sum();
    let all = forward_of(&device(), 131, &inputs::<f32>(131));
    let mut one = inputs::<f32>(131);
    one[0] = one[0][130 * INPUTS..].to_vec();
    one[4] = one[4][130 * outputs..].to_vec();
    assert_eq!(bits(&forward_of(&device(), 1, &one)[1]), bits(&all[1][130 * outputs..]));
    assert_same_on_all_devices(|device| {
        let mut found = forward_of(device, 131, &inputs(131));
        found.extend(backward_of(device, 131, &inputs(131), &values(9, 131 * outputs)));
        found
    });
}

#[test]
fn gradients_are_those_of_finite_differences() {
    let tokens = 5;
    let inputs = inputs::<f64>(tokens);
    // The factors, then x.
    let loss = |moved: &Tensors<f64>| {
        let mut all = inputs.clone();
        all[1..4].clone_from_slice(&moved[..3]);
        all[0].clone_from(&moved[3]);
        project_outputs(&[forward_of(&device(), tokens, &all)[1].clone()])
    };
    let d_y = &cotangents(&[forward_of(&device(), tokens, &inputs)[1].clone()])[0];
    let gradients = backward_of(&device(), tokens, &inputs, d_y);
    let moved = [&inputs[1..4], &inputs[..1]].concat();
    assert_gradients(&moved, &gradients, loss);
}
