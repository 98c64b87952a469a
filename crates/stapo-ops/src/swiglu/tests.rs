use super::*;
use crate::testing::*;

fn forward_of<T: Float>(device: &Device, dims: Dims, gate_up: &[T]) -> Vec<T> {
    let gate_up = upload(device, gate_up);
    let mut out = device.zeros(dims.tokens * dims.width).unwrap();
    forward(device, dims, gate_up.view(), out.view_mut());
    out.view().to_vec()
}

fn backward_of<T: Float>(device: &Device, dims: Dims, gate_up: &[T], d_out: &[T]) -> Vec<T> {
    let (gate_up, d_out) = (upload(device, gate_up), upload(device, d_out));
    let mut d_gate_up = device.zeros(gate_up.len()).unwrap();
    backward(device, dims, gate_up.view(), d_out.view(), d_gate_up.view_mut());
    d_gate_up.view().to_vec()
}

fn all_of<T: Float>(device: &Device, dims: Dims) -> Tensors<T> {
    let gate_up = values(1, 2 * dims.tokens * dims.width);
    let d_out = values(2, dims.tokens * dims.width);
    vec![forward_of(device, dims, &gate_up), backward_of(device, dims, &gate_up, &d_out)]
}

const GATES: [Gate; 2] = [Gate::Silu, Gate::GeluTanh];

/// Values of `torch.nn.functional.gelu(x, approximate="tanh")`.
#[test]
fn the_tanh_form_of_gelu_is_that_of_pytorch() {
    let dims = Dims { tokens: 1, width: 4, gate: Gate::GeluTanh };
    let out = forward_of(&device(), dims, &[-2.0f64, -0.5, 0.3, 1.7, 1.0, 1.0, 1.0, 1.0]);
    let expected =
        [-0.045_402_305_912_224_94, -0.154_285_990_174_856, 0.185_370_923_542_759, 1.624_105_895_551_156];
    assert!(out.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-12), "{out:?}");
}

#[test]
fn gradients_are_finite_differences() {
    let device = device();
    for gate in GATES {
        let dims = Dims { tokens: 3, width: 19, gate };
        let gate_up = values(1, 2 * 3 * 19);
        let d_out = &cotangents(&[vec![0.0; 3 * 19]])[0];
        let gradients = vec![backward_of(&device, dims, &gate_up, d_out)];
        assert_gradients(&vec![gate_up], &gradients, |x| project(&[forward_of(&device, dims, &x[0])]));
    }
}

#[test]
fn all_devices_agree_bitwise_and_stay_close_to_double() {
    let sizes = [(1, 1), (31, 33), (7, 257), (100, 512)];
    for ((tokens, width), gate) in sizes.into_iter().flat_map(|size| GATES.map(|gate| (size, gate))) {
        let dims = Dims { tokens, width, gate };
        assert_same_on_all_devices(|device| all_of(device, dims));
        assert_close(&all_of(&device(), dims), &all_of(&device(), dims), 1e-6);
    }
}

#[test]
fn extreme_gates_give_finite_outputs() {
    for gate in GATES {
        let dims = Dims { tokens: 1, width: 4, gate };
        let gate_up = [-200f32, 200.0, -88.0, 0.0, 1.0, 1.0, 1.0, 1.0];
        assert_eq!(forward_of(&device(), dims, &gate_up)[1], 200.0);
        let out = forward_of(&device(), dims, &gate_up);
        assert!(out[0].abs() < 1e-30 && out[2].abs() < 1e-30 && out[3] == 0.0);
        assert!(backward_of(&device(), dims, &gate_up, &[1.0; 4]).iter().all(|x| x.is_finite()));
    }
}
