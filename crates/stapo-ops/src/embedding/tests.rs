use super::*;
use crate::testing::*;

const DIMS: Dims = Dims { tokens: 41, vocab: 7, width: 33 };

#[test]
fn forward_copies_rows() {
    let device = device();
    let ids = ids(1, DIMS.tokens, DIMS.vocab);
    let table = values::<f32>(2, DIMS.vocab * DIMS.width);
    let mut out = device.zeros(DIMS.tokens * DIMS.width).unwrap();
    let (ids_on, table_on) = (upload(&device, &ids), upload(&device, &table));
    forward(&device, DIMS, ids_on.view(), table_on.view(), out.view_mut());
    for (id, row) in ids.iter().zip(out.view().to_vec().chunks(DIMS.width)) {
        assert_eq!(row, &table[*id as usize * DIMS.width..][..DIMS.width]);
    }
}

#[test]
fn backward_adds_rows_in_token_order_wherever_the_stream_is_cut() {
    let ids = ids(1, DIMS.tokens, DIMS.vocab);
    let d_out = values::<f32>(2, DIMS.tokens * DIMS.width);
    let before = values::<f32>(3, DIMS.vocab * DIMS.width);
    let mut expected = before.clone();
    for (id, row) in ids.iter().zip(d_out.chunks(DIMS.width)) {
        for (sum, x) in expected[*id as usize * DIMS.width..].iter_mut().zip(row) {
            *sum += x;
        }
    }
    for cut in [0, 1, 20] {
        assert_same_on_all_devices(|device| {
            let (ids, d_out, mut d_table) =
                (upload(device, &ids), upload(device, &d_out), upload(device, &before));
            for range in [0..cut, cut..DIMS.tokens] {
                let wide = range.start * DIMS.width..range.end * DIMS.width;
                let dims = Dims { tokens: range.len(), ..DIMS };
                backward(device, dims, ids.range(range), d_out.range(wide), d_table.view_mut());
            }
            let got = d_table.view().to_vec();
            assert_eq!(bits(&got), bits(&expected));
            vec![got]
        });
    }
}

#[test]
#[should_panic(expected = "embedding: id 9 of token 1 is not below 7")]
fn an_id_outside_the_table_is_named() {
    let device = device();
    let ids = upload(&device, &[0, 9]);
    let table = upload(&device, &[0f32; 7]);
    let dims = Dims { tokens: 2, vocab: 7, width: 1 };
    forward(&device, dims, ids.view(), table.view(), device.zeros(2).unwrap().view_mut());
}

#[test]
fn sums_apart_are_those_from_zero_added_once() {
    let d = Dims { tokens: 700, vocab: 23, width: 37 };
    let ids: Vec<u32> = (0..d.tokens as u32).map(|t| t * t % 19).collect();
    let (d_out, before) = (values::<f32>(1, d.tokens * d.width), values::<f32>(2, d.vocab * d.width));
    assert_same_on_all_devices(|device| {
        let (ids_on, d_out_on) = (upload(device, &ids), upload(device, &d_out));
        let mut from_zero = upload(device, &vec![0.0_f32; before.len()]);
        backward(device, d, ids_on.view(), d_out_on.view(), from_zero.view_mut());
        let expected: Vec<f32> =
            before.iter().zip(from_zero.view().to_vec()).map(|(sum, own)| sum + own).collect();
        // Of the memory apart nothing is read before it is written.
        let (mut apart, mut table) = (upload(device, &vec![f32::NAN; before.len()]), upload(device, &before));
        backward_apart(device, d, ids_on.view(), d_out_on.view(), apart.view_mut(), table.view_mut());
        let table = table.view().to_vec();
        assert_eq!(bits(&table), bits(&expected));
        vec![table]
    });
}
