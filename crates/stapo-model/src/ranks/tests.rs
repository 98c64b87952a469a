use super::*;

#[test]
fn every_element_has_one_owner_and_slices_stay_whole() {
    for len in [1, 7, SLICE - 1, SLICE, SLICE + 1, 5 * SLICE, 9 * SLICE + 3] {
        for world in 1..=8 {
            for parameter_idx in 0..5 {
                let share = Share { len, parameter_idx, world };
                let mut end = 0;
                for rank in share.in_order() {
                    let owned = share.owned_by(rank);
                    assert_eq!(owned.start, end, "{share:?} rank {rank}");
                    assert!(owned.end == len || owned.end.is_multiple_of(SLICE), "{share:?} rank {rank}");
                    end = owned.end;
                }
                assert_eq!(end, len, "{share:?}");
            }
        }
    }
}

#[test]
fn small_parameters_go_to_different_ranks() {
    let owner = |parameter_idx| {
        let share = Share { len: 64, parameter_idx, world: 4 };
        (0..4).find(|&rank| share.owned_by(rank) == (0..64)).unwrap()
    };
    let mut owners: Vec<usize> = (0..4).map(owner).collect();
    owners.sort_unstable();
    assert_eq!(owners, [0, 1, 2, 3]);
}

#[test]
fn parts_join_in_the_order_of_the_elements() {
    let share = Share { len: 3 * SLICE + 5, parameter_idx: 2, world: 3 };
    let all: Vec<usize> = (0..share.len).collect();
    let by_rank: Vec<Vec<usize>> = (0..3).map(|rank| all[share.owned_by(rank)].to_vec()).collect();
    assert_eq!(share.joined(&by_rank), all);
}
