use super::*;
use stapo_model::{CpuOptions, Device};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn membership(rank: usize, world: usize, port: u16, token: &str) -> Membership {
    let address = "127.0.0.1".to_string();
    Membership { rank, world, local_rank: rank, n_local: world, address, port, token: token.to_string() }
}

fn connected(rank: usize, world: usize, port: u16, token: &str) -> Result<Arc<Tcp>, RankError> {
    Tcp::connect(&membership(rank, world, port, token), &|_| ())
}

/// Runs `work` as every rank, each on a separate thread.
fn as_ranks<T: Send>(world: usize, port: u16, work: impl Fn(Arc<Tcp>) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let run = |rank| {
            let work = &work;
            scope.spawn(move || work(connected(rank, world, port, "secret").unwrap()))
        };
        let threads: Vec<_> = (0..world).map(run).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn bytes_and_numbers_arrive_where_they_belong() {
    for world in [2, 3, 5] {
        let seen = as_ranks(world, free_port(), |ranks| {
            let rank = ranks.rank();
            let all = ranks.all_gather(&vec![rank as u8; rank]).unwrap();
            let at_0 = ranks.gather(vec![10 + rank as u8]).unwrap();
            let from_0 = ranks.broadcast(if rank == 0 { b"word" } else { b"" }).unwrap();
            let device = Device::cpu(CpuOptions { threads: 1, ..CpuOptions::default() });
            let uploaded = device.upload(&[rank as f32, -0.0]).unwrap();
            let mut received = device.zeros::<f32>(2 * world).unwrap();
            let others: Vec<usize> = (0..world).filter(|&other| other != rank).collect();
            let sends = others.iter().map(|&to| (to, uploaded.view())).collect();
            let mut rest = received.view_mut();
            let mut receives = Vec::new();
            for from in 0..world {
                let (part, after) = rest.split_at(2);
                rest = after;
                if from != rank {
                    receives.push((from, part));
                }
            }
            ranks.exchange(&device, sends, receives).unwrap();
            (rank, all, at_0, from_0, received.view().to_vec())
        });
        for (rank, all, at_0, from_0, numbers) in seen {
            assert!(all.iter().enumerate().all(|(from, bytes)| *bytes == vec![from as u8; from]), "{all:?}");
            assert_eq!(at_0.len(), if rank == 0 { world } else { 0 });
            assert_eq!(from_0, b"word");
            for from in (0..world).filter(|&from| from != rank) {
                assert_eq!(numbers[2 * from], from as f32);
                assert_eq!(numbers[2 * from + 1].to_bits(), (-0.0_f32).to_bits());
            }
        }
    }
}

#[test]
fn a_failure_of_one_rank_is_the_error_of_all() {
    // Every rank leaves as soon as it has its error, whether or not the others have read theirs.
    for round in 0..24 {
        let failing = round % 3;
        let errors = as_ranks(3, free_port(), |ranks| match ranks.rank() {
            rank if rank == failing => ranks.fail("the GPU is gone"),
            _ => ranks.all_gather(b"").unwrap_err(),
        });
        for error in errors {
            assert_eq!(error, RankError { rank: failing, problem: "the GPU is gone".into() });
        }
    }
}

#[test]
fn the_last_word_of_a_rank_is_read_though_it_leaves_unread_messages_behind() {
    // The others send much that the failing rank never reads: its system resets such connections when they are closed.
    for failing in [0, 2] {
        let errors = as_ranks(3, free_port(), |ranks| {
            if ranks.rank() == failing {
                return ranks.fail("no space is left");
            }
            ranks.send(failing, vec![7; 1 << 20]);
            ranks.receive(failing).unwrap_err()
        });
        for error in errors {
            assert_eq!(error, RankError { rank: failing, problem: "no space is left".into() });
        }
    }
}

#[test]
fn single_messages_arrive_in_order_from_any_thread() {
    let seen = as_ranks(2, free_port(), |ranks| {
        if ranks.rank() == 1 {
            (0..5).for_each(|n| ranks.send(0, vec![n]));
            return ranks.receive(0).unwrap();
        }
        let read = std::thread::scope(|scope| {
            let read = || (0..5).map(|_| ranks.receive(1).unwrap()).collect::<Vec<_>>().concat();
            scope.spawn(read).join().unwrap()
        });
        ranks.send(1, b"done".to_vec());
        read
    });
    assert_eq!(seen, [vec![0, 1, 2, 3, 4], b"done".to_vec()]);
}

#[test]
fn a_difference_names_the_rank_and_the_thing() {
    let errors = as_ranks(3, free_port(), |ranks| {
        let version = if ranks.rank() == 2 { "1.1" } else { "1.0" };
        let facts =
            [("plan key seed".to_string(), "0".to_string()), ("program".to_string(), version.to_string())];
        agree(&*ranks, &facts).unwrap_err().to_string()
    });
    for error in errors {
        assert!(error.starts_with("rank 2: program is 1.1, and 1.0 on rank 0"), "{error}");
    }
}

/// Passes on what two sides send, until asked to stop.
fn relay(listener: TcpListener, to: u16, cut: &std::sync::mpsc::Sender<TcpStream>) {
    let cut = cut.clone();
    std::thread::spawn(move || {
        for caller in listener.incoming().flatten() {
            let Ok(called) = TcpStream::connect(("127.0.0.1", to)) else { return };
            for (mut from, mut into) in [
                (caller.try_clone().unwrap(), called.try_clone().unwrap()),
                (called.try_clone().unwrap(), caller.try_clone().unwrap()),
            ] {
                std::thread::spawn(move || {
                    let mut bytes = [0; 4096];
                    while let Ok(n @ 1..) = from.read(&mut bytes) {
                        if into.write_all(&bytes[..n]).is_err() {
                            return;
                        }
                    }
                });
            }
            let _ = cut.send(caller);
            let _ = cut.send(called);
        }
    });
}

/// The error of the first exchange that a cut reaches: what one side has, the other may still be waiting for.
fn until_cut(ranks: &Tcp) -> RankError {
    (0..3).find_map(|_| ranks.all_gather(b"apart").err()).unwrap()
}

#[test]
fn a_cut_network_stops_both_sides_with_the_same_error() {
    let (port, between) = (free_port(), TcpListener::bind("127.0.0.1:0").unwrap());
    let through = between.local_addr().unwrap().port();
    let (send, connections) = std::sync::mpsc::channel();
    let errors: Vec<RankError> = std::thread::scope(|scope| {
        let lead = scope.spawn(move || {
            let ranks = connected(0, 2, port, "").unwrap();
            until_cut(&ranks)
        });
        // Rank 0 has to listen before the relay calls it.
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        relay(between, port, &send);
        let other = scope.spawn(move || {
            let ranks = connected(1, 2, through, "").unwrap();
            ranks.all_gather(b"together").unwrap();
            for connection in connections.try_iter() {
                let _ = connection.shutdown(std::net::Shutdown::Both);
            }
            until_cut(&ranks)
        });
        [lead, other].map(|thread| thread.join().unwrap()).to_vec()
    });
    assert_eq!(errors[0].rank, 1, "{errors:?}");
    assert_eq!(errors[1].rank, 0, "each side names the other: {errors:?}");
    assert!(errors.iter().all(|error| error.problem.contains("connection was cut")), "{errors:?}");
}

#[test]
fn strangers_neither_join_nor_disturb() {
    let port = free_port();
    std::thread::scope(|scope| {
        let (tell, told) = std::sync::mpsc::channel();
        let lead = scope.spawn(move || {
            let report = |text: &str| tell.send(text.to_string()).unwrap();
            Tcp::connect(&membership(0, 2, port, "secret"), &report).unwrap().all_gather(b"0")
        });
        let connect = || loop {
            if let Ok(stream) = TcpStream::connect(("127.0.0.1", port)) {
                return stream;
            }
            std::thread::sleep(std::time::Duration::from_millis(5));
        };
        let silent = connect();
        connect().write_all(&[255; 5000]).unwrap();
        connect().write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        let refused = connected(1, 2, port, "guessed").err().unwrap().to_string();
        assert!(refused.contains("does not know the secret"), "{refused}");
        let report = told.recv_timeout(std::time::Duration::from_secs(10)).unwrap();
        assert!(report.contains("called as rank 1 with another STAPO_RANKS_TOKEN"), "{report}");
        let other = scope.spawn(move || connected(1, 2, port, "secret").unwrap().all_gather(b"1"));
        assert_eq!(lead.join().unwrap().unwrap(), [b"0", b"1"]);
        assert_eq!(other.join().unwrap().unwrap(), [b"0", b"1"]);
        drop(silent);
    });
    assert!(TcpStream::connect(("127.0.0.1", port)).is_err(), "nothing listens once all are there");
}

/// Twice as many connections as may shake hands at a time, each of which says a byte now and then.
#[test]
fn strangers_that_drip_bytes_hold_nobody_up() {
    let port = free_port();
    let is_over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let lead = scope.spawn(move || connected(0, 2, port, "secret").unwrap().all_gather(b"0"));
        let mut strangers: Vec<TcpStream> = Vec::new();
        while strangers.len() < 128 {
            match TcpStream::connect(("127.0.0.1", port)) {
                Ok(mut stream) => {
                    // The length of the longest message that is read.
                    stream.write_all(&512_u32.to_le_bytes()).unwrap();
                    strangers.push(stream);
                }
                Err(_) => std::thread::sleep(std::time::Duration::from_millis(5)),
            }
        }
        let is_over = &is_over;
        scope.spawn(move || {
            while !is_over.load(std::sync::atomic::Ordering::SeqCst) {
                for stranger in &mut strangers {
                    let _ = stranger.write_all(&[0]);
                }
                std::thread::sleep(std::time::Duration::from_millis(100));
            }
        });
        let began = std::time::Instant::now();
        let other = connected(1, 2, port, "secret").unwrap().all_gather(b"1").unwrap();
        is_over.store(true, std::sync::atomic::Ordering::SeqCst);
        assert_eq!(
            (other, lead.join().unwrap().unwrap()),
            (vec![b"0".to_vec(), b"1".to_vec()], vec![b"0".to_vec(), b"1".to_vec()])
        );
        assert!(began.elapsed() < std::time::Duration::from_secs(4), "{:?}", began.elapsed());
    });
}

/// Fewer numbers than a rank waits for would shift all that follow.
#[test]
fn a_message_of_another_length_stops_all_ranks() {
    let errors = as_ranks(2, free_port(), |ranks| {
        let device = Device::cpu(CpuOptions { threads: 1, ..CpuOptions::default() });
        let sent = device.upload(&[1.0_f32, 2.0]).unwrap();
        let other = 1 - ranks.rank();
        let expected = if ranks.rank() == 0 { 3 } else { 2 };
        let mut received = device.zeros::<f32>(expected).unwrap();
        let (sends, receives) = (vec![(other, sent.view())], vec![(other, received.view_mut())]);
        // Rank 1 has what it waits for, and learns of the failure with its next message.
        ranks.exchange(&device, sends, receives).and_then(|()| ranks.receive(other)).unwrap_err()
    });
    for error in errors {
        let problem = "rank 1 sent 8 bytes, expected 12".to_string();
        assert_eq!(error, RankError { rank: 0, problem });
    }
}
