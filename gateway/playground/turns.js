// What is known of turns: the time to the first token of each, and what that would have been without the hint.

/** The middle value, or null of none. */
export function median(values) {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

const MUCH = 200;

/**
 * Turns of this page. A turn: {session, first, added, hinted, ttftMs}; first: of its session, so there was nothing to bring; added: tokens that
 * its prompt has beyond the last one's prompt and answer. Only like is compared with like: turns that add much to their conversation compute much.
 */
export class Turns {
  #all = [];

  add(turn) {
    this.#all.push(turn);
  }

  /**
   * What turns without a hint took: the median of those measured in this page, of this session where it has any, else of all sessions.
   * {ms, count, here}, or null when there is none yet. Measured, never estimated: where a turn finds its cache in HBM anyway, the
   * figure says so too.
   */
  without(session) {
    const unhinted = this.#all.filter((turn) => !turn.hinted && comparable(turn));
    const own = unhinted.filter((turn) => turn.session === session);
    const counted = own.length ? own : unhinted;
    return counted.length ? { ms: median(counted.map((turn) => turn.ttftMs)), count: counted.length, here: own.length > 0 } : null;
  }

  /** The same of turns with a hint, of this session. */
  with(session) {
    const hinted = this.#all.filter((turn) => turn.session === session && turn.hinted && comparable(turn));
    return hinted.length ? { ms: median(hinted.map((turn) => turn.ttftMs)), count: hinted.length } : null;
  }
}

/** Whether a turn says anything about hints. */
export const comparable = (turn) => !turn.first && turn.added <= MUCH;

export const milliseconds = (ms) => (ms == null ? "–" : ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(2)} s`);
