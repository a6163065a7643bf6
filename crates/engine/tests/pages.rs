//! The page allocator under many random operations, with all invariants proved again after each batch of them.

mod common;

use common::{Random, kv_plan};
use lapidary_engine::Error;
use lapidary_engine::pages::{PagePool, SequencePages};
use lapidary_ops::{Batch, Group, PAGE_TOKENS};

const WINDOW: usize = 45;
const ROLLBACK: usize = 19;

struct Live {
    pages: SequencePages,
    cursor: usize,
    /// The furthest it came since rows were last taken back is `cursor`; it may go back to here.
    back_to: usize,
}

fn check(pool: &PagePool, live: &[Live], pins: &[(Group, u32)]) {
    pool.check(live.iter().map(|l| &l.pages), pins).expect("the invariants hold");
}

/// What the next rows see is there, and no more sliding pages than promised.
fn check_window(pool: &PagePool, live: &Live, rows: usize) {
    let mut batch = Batch::default();
    for table in pool.push_tables(&live.pages, &mut batch, live.cursor, rows).iter().enumerate() {
        let (g, table) = table;
        let first = if g == 0 { (live.cursor + 1).saturating_sub(WINDOW) / PAGE_TOKENS } else { 0 };
        assert_eq!(table.first_block, first);
        assert_eq!(table.first_block + table.count, (live.cursor + rows - 1) / PAGE_TOKENS + 1);
    }
}

#[test]
fn invariants_hold_over_many_random_operations() {
    let mut random = Random::new(11);
    let mut pool = PagePool::new(&kv_plan(WINDOW, [41, 67]), ROLLBACK);
    let mut live: Vec<Live> = Vec::new();
    let mut pins: Vec<(Group, u32)> = Vec::new();
    let (mut grown, mut refused, mut shared, mut adopted) = (0, 0, 0, 0);
    for step in 0..600_000 {
        let pick = if live.is_empty() { 0 } else { random.below(live.len()) };
        match random.below(20) {
            0 if live.len() < 12 => {
                live.push(Live { pages: SequencePages::default(), cursor: 0, back_to: 0 });
            }
            1 if !live.is_empty() => pool.free(live.swap_remove(pick).pages),
            2..=11 if !live.is_empty() => {
                let l = &mut live[pick];
                let rows = 1 + random.below(40);
                let before = Group::ALL.map(|g| (pool.available(g), l.pages.held(g)));
                let reach = pool.reach(&l.pages);
                match pool.grow(&mut l.pages, l.cursor + rows) {
                    Ok(()) => {
                        grown += 1;
                        assert!(l.cursor + rows <= reach);
                        check_window(&pool, l, rows);
                        l.cursor += rows;
                        l.back_to = l.back_to.max(l.cursor.saturating_sub(ROLLBACK));
                        pool.release_behind(&mut l.pages, l.cursor);
                        let most = pool.need(l.cursor, 40);
                        assert!(Group::ALL.iter().all(|&g| l.pages.held(g) <= most[g.index()]));
                    }
                    Err(Error::OutOfPages { needed, free, .. }) => {
                        refused += 1;
                        assert!(needed > free && l.cursor + rows > reach);
                        assert_eq!(before, Group::ALL.map(|g| (pool.available(g), l.pages.held(g))));
                    }
                    Err(other) => panic!("{other}"),
                }
            }
            12..=13 if !live.is_empty() => {
                let l = &mut live[pick];
                let end = l.back_to + random.below(l.cursor - l.back_to + 1);
                let before = Group::ALL.map(|g| l.pages.held(g));
                match pool.truncate(&mut l.pages, end) {
                    Ok(()) => {
                        l.cursor = end;
                        let behind = end.div_ceil(PAGE_TOKENS);
                        assert!(Group::ALL.iter().all(|&g| l.pages.page(g, behind).is_none()));
                    }
                    Err(Error::SharedPage { position }) => {
                        shared += 1;
                        assert_eq!(position, end);
                        assert_eq!(before, Group::ALL.map(|g| l.pages.held(g)));
                    }
                    Err(other) => panic!("{other}"),
                }
            }
            14..=15 if !live.is_empty() && pins.len() < 30 => {
                // Only whole blocks are ever shared.
                let l = &live[pick];
                let group = Group::ALL[random.below(2)];
                let block = random.below(l.cursor / PAGE_TOKENS + 1);
                if let Some(page) =
                    l.pages.page(group, block).filter(|_| (block + 1) * PAGE_TOKENS <= l.cursor)
                {
                    pool.pin(group, page).unwrap();
                    pins.push((group, page));
                }
            }
            16..=17 if !pins.is_empty() => {
                let (group, page) = pins.swap_remove(random.below(pins.len()));
                pool.unpin(group, page).unwrap();
            }
            18 if !live.is_empty() && live.len() < 12 => {
                let l = &live[pick];
                let end = random.below(l.cursor / PAGE_TOKENS + 1);
                let first = (end * PAGE_TOKENS + 1).saturating_sub(WINDOW + ROLLBACK) / PAGE_TOKENS;
                let table =
                    |group, from| (from..end).map(|b| l.pages.page(group, b)).collect::<Option<Vec<u32>>>();
                if let (Some(sliding), Some(full)) = (table(Group::Sliding, first), table(Group::Full, 0)) {
                    let pages = pool.adopt([(first, &sliding), (0, &full)]).unwrap();
                    adopted += 1;
                    let cursor = end * PAGE_TOKENS;
                    live.push(Live { pages, cursor, back_to: cursor.saturating_sub(ROLLBACK) });
                }
            }
            _ => {}
        }
        if step % 16 == 0 {
            check(&pool, &live, &pins);
        }
    }
    println!("{grown} grown, {refused} refused, {shared} shared, {adopted} adopted");
    assert!(grown > 10_000 && refused > 1_000 && shared > 100 && adopted > 1_000, "every case was met");
    live.drain(..).for_each(|l| pool.free(l.pages));
    pins.drain(..).for_each(|(group, page)| pool.unpin(group, page).unwrap());
    check(&pool, &[], &[]);
    assert_eq!(Group::ALL.map(|g| pool.available(g)), [40, 66]);
}

#[test]
fn a_page_of_nobody_cannot_be_pinned_and_nothing_changes() {
    let mut pool = PagePool::new(&kv_plan(WINDOW, [5, 7]), ROLLBACK);
    for page in [0, 3, 7, u32::MAX] {
        assert!(matches!(pool.pin(Group::Full, page), Err(Error::FreePage { .. })));
        assert!(matches!(pool.unpin(Group::Full, page), Err(Error::FreePage { .. })));
        assert!(matches!(
            pool.adopt([(0, &[]), (0, &[page])]),
            Err(Error::FreePage { .. } | Error::Length { .. })
        ));
    }
    pool.check([], &[]).unwrap();
}

#[test]
fn what_has_left_the_window_is_not_gone_back_to() {
    let mut pool = PagePool::new(&kv_plan(WINDOW, [20, 20]), ROLLBACK);
    let mut pages = SequencePages::default();
    pool.grow(&mut pages, 300).unwrap();
    pool.release_behind(&mut pages, 300);
    // 300 + 1 - 45 - 19 = 237 is in block 7.
    assert_eq!(pages.page(Group::Sliding, 6), None);
    assert!(pages.page(Group::Sliding, 7).is_some() && pages.page(Group::Full, 0).is_some());
    let earliest = 7 * PAGE_TOKENS + WINDOW - 1;
    let error = pool.truncate(&mut pages, earliest - 1).unwrap_err();
    assert!(matches!(error, Error::LeftWindow { earliest: e, .. } if e == earliest), "{error}");
    pool.truncate(&mut pages, earliest).unwrap();
    pool.free(pages);
    pool.check([], &[]).unwrap();
}

#[test]
fn a_lost_sequence_and_a_double_owner_are_noticed() {
    let mut pool = PagePool::new(&kv_plan(WINDOW, [9, 9]), ROLLBACK);
    let mut pages = SequencePages::default();
    pool.grow(&mut pages, 40).unwrap();
    assert!(pool.check([], &[]).unwrap_err().contains("holders"));
    assert!(pool.check([&pages, &pages], &[]).unwrap_err().contains("holders"));
    pool.check([&pages], &[]).unwrap();
}
