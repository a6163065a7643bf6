//! The tree of kept pages.
//!
//! A node is a block of 32 rows under its key, with the full group's page. A node may carry a snapshot: the sliding
//! pages of the window that ends with its block. Only at a snapshot can a request go on, so the tree holds nothing
//! else than the ways to snapshots: a node without one below it or at it is dropped at once.
//!
//! Each distinct page counts as kept once, however many snapshots hold it.

use std::collections::{BTreeSet, HashMap};

use lapidary_ops::{GROUPS, Group, PAGE_TOKENS};

use super::chain::BlockKey;
use crate::pages::{PagePool, SequencePages};

/// Counts and sizes of what is kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefixStats {
    /// Requests that were let in and asked.
    pub queries: u64,
    /// Those of them that found something.
    pub hits: u64,
    /// Rows that did not run because of it.
    pub hit_rows: u64,
    /// Snapshots that were taken.
    pub taken: u64,
    /// Snapshots that were given up for others or for requests.
    pub evicted: u64,
    /// Snapshots there are.
    pub snapshots: usize,
    /// Blocks there are.
    pub blocks: usize,
    /// Sliding pages that snapshots hold.
    pub sliding_pages: usize,
}

/// Kept blocks by key.
#[derive(Debug)]
pub(crate) struct PrefixTree {
    nodes: HashMap<BlockKey, Node>,
    /// Snapshots, the least recently used first.
    recency: BTreeSet<(u64, BlockKey)>,
    clock: u64,
    /// How many snapshots hold a sliding page.
    sliding: HashMap<u32, u32>,
    /// Most sliding pages.
    most_sliding: usize,
    /// Of sliding layers, when there are any.
    window: Option<usize>,
    has_full: bool,
    pub stats: PrefixStats,
}

#[derive(Debug)]
struct Node {
    parent: Option<BlockKey>,
    children: usize,
    /// `None` for a model without full layers.
    full: Option<u32>,
    snapshot: Option<Snapshot>,
}

#[derive(Debug)]
struct Snapshot {
    used: u64,
    /// Of the window's blocks, the oldest first.
    pages: Vec<u32>,
}

impl PrefixTree {
    /// Nothing kept yet; snapshots may hold `most_sliding` sliding pages.
    pub fn new(pool: &PagePool, most_sliding: usize) -> PrefixTree {
        PrefixTree {
            nodes: HashMap::new(),
            recency: BTreeSet::new(),
            clock: 0,
            sliding: HashMap::new(),
            most_sliding,
            window: pool.window(Group::Sliding),
            has_full: pool.has_layers(Group::Full),
            stats: PrefixStats::default(),
        }
    }

    /// The first block that the window before the end of block `blocks - 1` needs.
    fn first_block(&self, blocks: usize) -> usize {
        let window = self.window.unwrap_or(1);
        (blocks * PAGE_TOKENS + 1).saturating_sub(window) / PAGE_TOKENS
    }

    /// The first block of the window before the end of block `blocks - 1`, where there are sliding layers.
    pub fn window_from(&self, blocks: usize) -> Option<usize> {
        self.window.map(|_| self.first_block(blocks))
    }

    /// Whether blocks have full pages.
    pub fn has_full(&self) -> bool {
        self.has_full
    }

    /// The full pages of blocks, all of which must be in the tree.
    pub fn full_pages(&self, keys: &[BlockKey]) -> Option<Vec<u32>> {
        let pages = keys.iter().map(|key| self.nodes.get(key).map(|node| node.full));
        Some(pages.collect::<Option<Vec<_>>>()?.into_iter().flatten().collect())
    }

    /// Page `place`, from the oldest, of the snapshot at a block.
    pub fn sliding_page(&self, key: BlockKey, place: usize) -> Option<u32> {
        self.nodes.get(&key)?.snapshot.as_ref()?.pages.get(place).copied()
    }

    /// How many blocks of `keys` are in the tree, and after how many of them, at most `most`, a request can go on.
    pub fn find(&self, keys: &[BlockKey], most: usize) -> Found {
        // A block in the tree has all before it there too.
        let (mut known, mut beyond) = (0, keys.len());
        while known < beyond {
            let middle = known + (beyond - known) / 2;
            match self.nodes.contains_key(&keys[middle]) {
                true => known = middle + 1,
                false => beyond = middle,
            }
        }
        let usable = (1..=known.min(most)).rev().find(|b| self.nodes[&keys[b - 1]].snapshot.is_some());
        Found { known, usable: usable.unwrap_or(0) }
    }

    /// Of the pages that [`PrefixTree::adopt`] would hand over, by group, those that a request holds anyway.
    pub fn live(&self, pool: &PagePool, keys: &[BlockKey], blocks: usize) -> [usize; GROUPS] {
        if blocks == 0 {
            return [0; GROUPS];
        }
        let live = |group, page: &u32| pool.holders(group, *page) > 1;
        let snapshot = self.nodes[&keys[blocks - 1]].snapshot.as_ref().expect("found usable");
        let sliding = snapshot.pages.iter().filter(|p| live(Group::Sliding, p)).count();
        let full = keys[..blocks].iter().filter_map(|k| self.nodes[k].full);
        [sliding, full.filter(|p| live(Group::Full, p)).count()]
    }

    /// A sequence that goes on after `blocks` blocks, which [`PrefixTree::find`] found usable.
    pub fn adopt(&mut self, pool: &mut PagePool, keys: &[BlockKey], blocks: usize) -> SequencePages {
        let key = keys[blocks - 1];
        self.touch(key);
        let full: Vec<u32> = keys[..blocks].iter().filter_map(|k| self.nodes[k].full).collect();
        let snapshot = self.nodes[&key].snapshot.as_ref().expect("found usable");
        let sliding = if self.window.is_some() { self.first_block(blocks) } else { 0 };
        let pages = pool.adopt([(sliding, &snapshot.pages), (0, &full)]);
        pages.expect("pages of the tree are held and end at one block")
    }

    /// Keeps the first `blocks` blocks of a sequence, with a snapshot at their end. Nothing is kept when the
    /// sequence does not hold the window's pages any more or the budget is too small. Whether a snapshot was taken
    /// that was not there.
    ///
    /// Where the tree has a block already, the sequence goes on with the tree's full page and gives its own back:
    /// whoever holds a block of the tree holds all before it, so that what is idle can be given up from its end.
    pub fn keep(
        &mut self,
        pool: &mut PagePool,
        keys: &[BlockKey],
        blocks: usize,
        pages: &mut SequencePages,
    ) -> bool {
        let Some(&key) = blocks.checked_sub(1).and_then(|last| keys.get(last)) else { return false };
        if self.nodes.get(&key).is_some_and(|n| n.snapshot.is_some()) {
            self.touch(key);
            return false;
        }
        let range = if self.window.is_some() { self.first_block(blocks)..blocks } else { 0..0 };
        let window: Option<Vec<u32>> = range.map(|b| pages.page(Group::Sliding, b)).collect();
        let Some(window) = window else { return false };
        let full = |b| if self.has_full { pages.page(Group::Full, b).map(Some) } else { Some(None) };
        let Some(full) = (0..blocks).map(full).collect::<Option<Vec<Option<u32>>>>() else { return false };
        if !self.make_room(pool, &window) {
            return false;
        }
        let mut parent = None;
        for (block, (key, full)) in keys[..blocks].iter().zip(full).enumerate() {
            if let Some(node) = self.nodes.get(key) {
                if let Some(page) = node.full.filter(|page| full != Some(*page)) {
                    pool.swap(pages, Group::Full, block, page);
                }
            } else {
                if let Some(page) = full {
                    pool.keep(Group::Full, page);
                }
                if let Some(parent) = parent {
                    let parent: &mut Node = self.nodes.get_mut(&parent).expect("just passed");
                    parent.children += 1;
                }
                self.nodes.insert(*key, Node { parent, children: 0, full, snapshot: None });
            }
            parent = Some(*key);
        }
        for &page in &window {
            let holders = self.sliding.entry(page).or_insert(0);
            if *holders == 0 {
                pool.keep(Group::Sliding, page);
            }
            *holders += 1;
        }
        self.clock += 1;
        let snapshot = Snapshot { used: self.clock, pages: window };
        self.nodes.get_mut(&key).expect("just put in").snapshot = Some(snapshot);
        self.recency.insert((self.clock, key));
        self.stats.taken += 1;
        true
    }

    /// Gives up old snapshots until the budget has room for these sliding pages.
    fn make_room(&mut self, pool: &mut PagePool, window: &[u32]) -> bool {
        if window.len() > self.most_sliding {
            return false;
        }
        loop {
            let added = window.iter().filter(|page| !self.sliding.contains_key(page)).count();
            if self.sliding.len() + added <= self.most_sliding {
                return true;
            }
            let Some(&(_, oldest)) = self.recency.first() else { return false };
            self.drop_snapshot(pool, oldest);
            self.stats.evicted += 1;
        }
    }

    /// Gives up snapshots, the least recently used first, until `pages` pages of a group are free, or none is kept
    /// that no request holds.
    pub fn evict(&mut self, pool: &mut PagePool, group: Group, pages: usize) {
        while pool.free_pages(group) < pages {
            let gives = self.recency.iter().map(|(_, key)| *key).find(|key| self.gives(pool, group, *key));
            let Some(key) = gives else { return };
            self.drop_snapshot(pool, key);
            self.stats.evicted += 1;
        }
    }

    /// Whether a page of a group that no request holds comes nearer to being free without this snapshot.
    fn gives(&self, pool: &PagePool, group: Group, key: BlockKey) -> bool {
        let node = &self.nodes[&key];
        let idle = |page: &u32| pool.holders(group, *page) == 1;
        match group {
            Group::Sliding => node.snapshot.as_ref().is_some_and(|s| s.pages.iter().any(idle)),
            // Whoever holds a block holds all before it, so an idle one has an idle one at its end.
            Group::Full => node.children == 0 && node.full.as_ref().is_some_and(idle),
        }
    }

    /// Takes back what was kept of a sequence that turned out bad.
    pub fn forget(&mut self, pool: &mut PagePool, key: BlockKey) {
        if self.nodes.get(&key).is_some_and(|n| n.snapshot.is_some()) {
            self.drop_snapshot(pool, key);
        }
    }

    fn drop_snapshot(&mut self, pool: &mut PagePool, key: BlockKey) {
        let node = self.nodes.get_mut(&key).expect("a snapshot's node");
        let snapshot = node.snapshot.take().expect("it has one");
        self.recency.remove(&(snapshot.used, key));
        for page in snapshot.pages {
            let holders = self.sliding.get_mut(&page).expect("counted when it was taken");
            *holders -= 1;
            if *holders == 0 {
                self.sliding.remove(&page);
                pool.unkeep(Group::Sliding, page);
            }
        }
        // Blocks that lead nowhere go too.
        let mut next = Some(key);
        while let Some(key) = next {
            let node = &self.nodes[&key];
            if node.children > 0 || node.snapshot.is_some() {
                return;
            }
            let node = self.nodes.remove(&key).expect("seen above");
            if let Some(page) = node.full {
                pool.unkeep(Group::Full, page);
            }
            if let Some(parent) = node.parent {
                self.nodes.get_mut(&parent).expect("a block in the tree has all before it there").children -=
                    1;
            }
            next = node.parent;
        }
    }

    fn touch(&mut self, key: BlockKey) {
        self.clock += 1;
        let clock = self.clock;
        let snapshot = self.nodes.get_mut(&key).and_then(|n| n.snapshot.as_mut()).expect("it has one");
        self.recency.remove(&(snapshot.used, key));
        snapshot.used = clock;
        self.recency.insert((clock, key));
    }

    /// Counts and sizes.
    pub fn stats(&self) -> PrefixStats {
        PrefixStats {
            snapshots: self.recency.len(),
            blocks: self.nodes.len(),
            sliding_pages: self.sliding.len(),
            ..self.stats
        }
    }

    /// Every page that is kept, once.
    pub fn pins(&self) -> Vec<(Group, u32)> {
        let full = self.nodes.values().filter_map(|n| n.full).map(|page| (Group::Full, page));
        full.chain(self.sliding.keys().map(|&page| (Group::Sliding, page))).collect()
    }

    /// Proves the invariants.
    ///
    /// # Errors
    /// What is wrong, in words.
    pub fn check(&self, pool: &PagePool) -> Result<(), String> {
        let idle = |node: &Node| node.full.is_some_and(|page| pool.holders(Group::Full, page) == 1);
        for (key, node) in &self.nodes {
            if node.parent.is_some_and(|parent| !idle(node) && self.nodes.get(&parent).is_some_and(idle)) {
                return Err(format!("a request holds block {key:?} and not the one before"));
            }
        }
        let mut children: HashMap<BlockKey, usize> = HashMap::new();
        let mut sliding: HashMap<u32, u32> = HashMap::new();
        for (key, node) in &self.nodes {
            if let Some(parent) = node.parent {
                *children.entry(parent).or_default() += 1;
                if !self.nodes.contains_key(&parent) {
                    return Err(format!("block {key:?} hangs in the air"));
                }
            }
            if let Some(snapshot) = &node.snapshot {
                snapshot.pages.iter().for_each(|&page| *sliding.entry(page).or_default() += 1);
                if !self.recency.contains(&(snapshot.used, *key)) {
                    return Err(format!("snapshot {key:?} is in no order"));
                }
            } else if node.children == 0 {
                return Err(format!("block {key:?} leads nowhere"));
            }
        }
        if let Some((key, _)) =
            self.nodes.iter().find(|(k, n)| n.children != children.get(k).copied().unwrap_or(0))
        {
            return Err(format!("block {key:?} miscounts the blocks behind it"));
        }
        let snapshots = self.nodes.values().filter(|n| n.snapshot.is_some()).count();
        if snapshots != self.recency.len() || sliding != self.sliding {
            return Err("snapshots and their pages are miscounted".into());
        }
        match self.sliding.len() > self.most_sliding {
            true => Err(format!("{} sliding pages exceed the budget", self.sliding.len())),
            false => Ok(()),
        }
    }
}

/// What the tree knows of a sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Found {
    /// Blocks from the beginning that are in the tree.
    pub known: usize,
    /// Blocks after which a request can go on.
    pub usable: usize,
}

#[cfg(test)]
mod tests {
    use lapidary_ops::{KvFormat, KvGroupPlan, KvLayerShape, KvPlan};

    use super::*;
    use crate::prefix::chain::{Chain, Content};
    use crate::prefix::window_blocks;

    const WINDOW: usize = 70;

    fn pool(pages: [usize; GROUPS]) -> PagePool {
        let groups = [Some(WINDOW), None].into_iter().zip(pages).map(|(window, pages)| KvGroupPlan {
            layers: vec![KvLayerShape { kv_heads: 1, head_dim: 2 }],
            format: KvFormat::F32,
            pages,
            window,
        });
        let groups: Vec<KvGroupPlan> = groups.collect();
        PagePool::new(&KvPlan { groups: groups.try_into().expect("two groups") }, PAGE_TOKENS - 1)
    }

    fn chain(tokens: &[u32]) -> Chain {
        let mut chain = Chain::default();
        tokens.iter().for_each(|&t| chain.push(Content::Text(t)));
        chain
    }

    /// A cache without a tree: a list of beginnings and when each was last used.
    #[derive(Default)]
    struct Naive {
        kept: Vec<(Vec<u32>, u64)>,
        clock: u64,
    }

    impl Naive {
        fn find(&self, tokens: &[u32], most: usize) -> usize {
            let fits = |kept: &[u32]| tokens.starts_with(kept) && kept.len() <= most * PAGE_TOKENS;
            self.kept.iter().filter(|(k, _)| fits(k)).map(|(k, _)| k.len() / PAGE_TOKENS).max().unwrap_or(0)
        }

        fn touch(&mut self, tokens: &[u32]) {
            self.clock += 1;
            match self.kept.iter_mut().find(|(k, _)| k == tokens) {
                Some((_, used)) => *used = self.clock,
                None => self.kept.push((tokens.to_vec(), self.clock)),
            }
        }

        fn drop_oldest(&mut self) {
            let oldest = self.kept.iter().enumerate().min_by_key(|(_, (_, used))| *used).expect("some").0;
            self.kept.swap_remove(oldest);
        }
    }

    /// SplitMix64.
    fn random(state: &mut u64) -> usize {
        *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 3) as usize
    }

    #[test]
    fn the_tree_finds_and_gives_up_what_a_plain_list_does() {
        for (seed, snapshots) in [(1, 3), (2, 7), (3, 1000)] {
            let mut state = seed;
            // Windows of blocks that different sequences computed share no page, so a budget is a number of
            // windows; and sequences begin anew here, so none has pages in common by chance.
            let per_window = window_blocks(WINDOW);
            let mut pool = pool([4000, 4000]);
            let mut tree = PrefixTree::new(&pool, snapshots * per_window);
            let mut naive = Naive::default();
            let mut live: Vec<SequencePages> = Vec::new();
            let (mut hits, mut evicted) = (0, 0);
            for step in 0..6_000 {
                // Few tokens, so that beginnings are shared by chance.
                let blocks = per_window + random(&mut state) % 4;
                let rows = blocks * PAGE_TOKENS + random(&mut state) % PAGE_TOKENS;
                let tokens: Vec<u32> = {
                    let mut kinds: Vec<u32> = (0..=blocks).map(|_| (random(&mut state) % 2) as u32).collect();
                    kinds[0] = 0;
                    (0..rows).map(|r| kinds[r / PAGE_TOKENS]).collect()
                };
                let names = chain(&tokens);
                let most = 1 + random(&mut state) % (blocks + 1);
                let found = tree.find(names.keys(), most);
                assert_eq!(found.usable, naive.find(&tokens, most), "step {step}");
                if found.usable > 0 && random(&mut state).is_multiple_of(2) {
                    hits += 1;
                    let pages = tree.adopt(&mut pool, names.keys(), found.usable);
                    assert_eq!(pages.held(Group::Full), found.usable);
                    assert_eq!(pages.held(Group::Sliding), per_window.min(found.usable));
                    naive.touch(&tokens[..found.usable * PAGE_TOKENS]);
                    live.push(pages);
                } else {
                    let mut pages = SequencePages::default();
                    pool.grow(&mut pages, rows).unwrap();
                    let known = naive.kept.iter().any(|(k, _)| k[..] == tokens[..blocks * PAGE_TOKENS]);
                    let taken = tree.keep(&mut pool, names.keys(), blocks, &mut pages);
                    assert_eq!(taken, !known);
                    if taken && naive.kept.len() == snapshots {
                        naive.drop_oldest();
                        evicted += 1;
                    }
                    naive.touch(&tokens[..blocks * PAGE_TOKENS]);
                    live.push(pages);
                }
                if live.len() > 20 {
                    pool.free(live.swap_remove(random(&mut state) % live.len()));
                }
                if step % 64 == 0 {
                    tree.check(&pool).unwrap();
                    pool.check(&live, &tree.pins()).unwrap();
                }
            }
            assert!(hits > 300 && (evicted > 500 || snapshots == 1000), "{hits} hits, {evicted} evicted");
            live.drain(..).for_each(|pages| pool.free(pages));
            // Without requests every kept page is idle, and all can be had back.
            for group in Group::ALL {
                assert_eq!(pool.available(group), 3999);
                tree.evict(&mut pool, group, 3999);
                assert_eq!(pool.free_pages(group), 3999);
            }
            assert!(tree.nodes.is_empty() && tree.recency.is_empty() && tree.sliding.is_empty());
            pool.check([], &[]).unwrap();
        }
    }

    #[test]
    fn pages_that_requests_hold_are_not_given_up_for_pages() {
        let mut pool = pool([20, 20]);
        let mut tree = PrefixTree::new(&pool, 19);
        let tokens: Vec<u32> = (0..5 * PAGE_TOKENS as u32).collect();
        let names = chain(&tokens);
        let mut pages = SequencePages::default();
        pool.grow(&mut pages, tokens.len()).unwrap();
        assert!(tree.keep(&mut pool, names.keys(), 5, &mut pages));
        assert!(!tree.keep(&mut pool, names.keys(), 5, &mut pages), "it is there already");
        tree.evict(&mut pool, Group::Full, 19);
        assert_eq!(tree.find(names.keys(), 5).usable, 5, "nothing would have been won");
        assert_eq!(pool.available(Group::Full), 14);
        pool.free(pages);
        assert_eq!((pool.available(Group::Full), pool.idle(Group::Full)), (19, 5));
        // Another request goes on from it: no longer idle.
        let other = tree.adopt(&mut pool, names.keys(), 5);
        assert_eq!((pool.available(Group::Full), pool.idle(Group::Full)), (14, 0));
        pool.free(other);
        tree.evict(&mut pool, Group::Sliding, 19);
        assert_eq!(tree.find(names.keys(), 5), Found::default());
        pool.check([], &[]).unwrap();
    }

    #[test]
    fn a_snapshot_needs_its_whole_window() {
        let mut pool = pool([20, 20]);
        let mut tree = PrefixTree::new(&pool, 19);
        let tokens: Vec<u32> = (0..9 * PAGE_TOKENS as u32).collect();
        let names = chain(&tokens);
        let mut pages = SequencePages::default();
        pool.grow(&mut pages, tokens.len()).unwrap();
        pool.release_behind(&mut pages, tokens.len());
        // A row at 288 sees 219 .. 288, and 31 positions more are kept: from block 5 on.
        assert!(pages.page(Group::Sliding, 5).is_some() && pages.page(Group::Sliding, 4).is_none());
        assert!(!tree.keep(&mut pool, names.keys(), 7, &mut pages), "187 .. 224 begin in block 4");
        assert!(tree.keep(&mut pool, names.keys(), 8, &mut pages));
        assert!(!tree.keep(&mut pool, names.keys(), 0, &mut pages));
        pool.free(pages);
        pool.check([], &tree.pins()).unwrap();
        // A budget smaller than a window keeps nothing.
        let mut small = PrefixTree::new(&pool, 2);
        let mut pages = tree.adopt(&mut pool, names.keys(), 8);
        assert!(!small.keep(&mut pool, names.keys(), 8, &mut pages));
        pool.free(pages);
    }
}
