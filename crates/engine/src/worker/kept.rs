//! Beginnings that outlive their requests: stored pages are read before a request is queued, and written after it has
//! ended.

use lapidary_ops::{Group, PAGE_TOKENS};
use sha2::{Digest, Sha256};

use super::{Command, Worker};
use crate::error::Result;
use crate::prefix::{LoadedPages, PrefixOptions, Store};
use crate::runner::Runner;
use crate::scheduler::{Prepared, RequestId, Wanted};

/// Changes when stored pages of earlier versions must not be read any more.
const LAYOUT: &str = "lapidary pages 1";

impl Worker {
    /// Queues a request, once what is stored of its beginning was read.
    pub(super) fn take_in(&mut self, id: RequestId, prepared: Box<Prepared>) {
        if let Some(store) = &self.store
            && let Some(wanted) = self.scheduler.stored(&prepared, store)
        {
            let (commands, names) = (self.commands.clone(), wanted.pages.clone());
            store.load(names, move |pages| {
                // An engine that is gone has no use for them.
                let _ = commands.send(Command::Loaded { id, wanted, pages });
            });
            self.loading.insert(id, prepared);
            return;
        }
        self.queue(id, *prepared);
    }

    /// Puts pages that were read where the request will find them.
    pub(super) fn import(&mut self, prepared: &Prepared, wanted: &Wanted, pages: &LoadedPages) {
        let Some(import) = self.scheduler.import(prepared, wanted) else { return };
        let mut filled = true;
        for (group, pages) in [(Group::Sliding, &pages.sliding), (Group::Full, &pages.full)] {
            for (block, bytes) in pages {
                let page = import.pages.page(group, *block).expect("one for each that was wanted");
                filled &= self.runner.page_write(group, page as usize, bytes).is_ok();
            }
        }
        self.scheduler.keep_import(prepared, import, filled);
    }

    /// Stores what requests that have ended left.
    pub(super) fn store_left(&mut self) {
        let Some(store) = &self.store else { return };
        for left in self.scheduler.take_left() {
            for &blocks in &left.snapshots {
                let full = (0..blocks).map(|block| (Group::Full, block));
                let first = self.scheduler.window_from(blocks).unwrap_or(blocks);
                let sliding = (first..blocks).map(|block| (Group::Sliding, block));
                for (group, block) in full.chain(sliding) {
                    let name = (group, left.keys[block]);
                    if store.has(name) {
                        continue;
                    }
                    // Given up for others already, it may be.
                    let Some(page) = self.scheduler.kept_page(&left, blocks, group, block) else { break };
                    let mut bytes = Vec::new();
                    if self.runner.page_read(group, page as usize, &mut bytes).is_ok() {
                        store.save(name, bytes);
                    }
                }
            }
        }
    }
}

/// The store that the options ask for.
pub(super) fn open_store(runner: &mut Runner, options: &PrefixOptions) -> Result<Option<Store>> {
    let Some(dir) = options.dir.as_ref().filter(|_| options.enabled) else { return Ok(None) };
    // A device that cannot hand pages out says so here and not at every page.
    for group in Group::ALL {
        runner.page_read(group, 0, &mut Vec::new())?;
    }
    let (report, plan, config) = (runner.report(), runner.plan(), &runner.model().config);
    let layout = plan.groups.each_ref().map(|g| (g.layers.clone(), g.format, g.window));
    // All that keys and values, bit by bit, follow from beside the prompt.
    let origin = format!(
        "{LAYOUT} {PAGE_TOKENS} {:?} {} {} {} {} {} {layout:?}",
        dir.model, report.backend, report.level, report.mode, config.model_type, config.hidden
    );
    let identity = Sha256::digest(origin.as_bytes()).into();
    let page_bytes =
        plan.groups.each_ref().map(|g| (0..g.layers.len()).map(|layer| g.page_bytes(layer)).sum());
    Ok(Some(Store::open(dir, identity, page_bytes)?))
}
