// The run as the page holds it: columns, lineage, running scores and texts. It knows nothing of pixels.

const NONE = -1;
const MOST_TEXTS = 64; // kept unpacked

class Run {
  constructor(data, store) {
    Object.assign(this, data);
    this.store = store; // the text store's element: read only when a text is wanted
    this.size = this.traces.parent.length;
    this.last = Math.max(1, this.run.last_step);
    this.children = this.traces.parent.map(() => []);
    this.traces.parent.forEach((parent, trace) => parent !== NONE && this.children[parent].push(trace));
    this.roots = [...this.traces.parent.keys()].filter((trace) => this.traces.parent[trace] === NONE);
    this.numIslands = 1 + this.traces.island.reduce((most, island) => Math.max(most, island), 0);
    this.unpackThoughts();
    this.textStart = starts(this.traces.text);
    this.voteOf = new Int32Array(this.size).fill(NONE);
    this.votes.forEach((row, index) => row.traces.forEach((trace) => { this.voteOf[trace] = index; }));
    this.winner = this.votes.length === 0 ? NONE
      : this.votes[0].traces.reduce((best, trace) => (this.score(trace) ?? 0) > (this.score(best) ?? 0) ? trace : best);
    this.known = new Map(); // trace -> promise of its whole text as bytes
  }

  // Thoughts come as differences; scores of a trace are folded here as the search folded them.
  unpackThoughts() {
    const { thoughts, traces } = this;
    this.first = starts(traces.thoughts);
    for (const name of ["step", "tokens", "bytes"]) thoughts[name] = sums(thoughts[name], this.first);
    thoughts.value = new Float64Array(thoughts.score.length); // the trace's score after the thought
    this.startTotal = new Float64Array(this.size);
    const total = new Float64Array(thoughts.score.length);
    const isMean = this.run.aggregation === "mean";
    for (let trace = 0; trace < this.size; trace++) {
      let sum = this.startTotal[trace] = this.totalAt(traces.parent[trace], traces.seen[trace], total);
      for (let i = this.first[trace], n = traces.seen[trace] + 1; i < this.first[trace + 1]; i++, n++) {
        total[i] = sum += thoughts.score[i];
        thoughts.value[i] = isMean ? sum / n : thoughts.score[i];
      }
    }
  }

  // The sum of the first `count` thought scores of a trace.
  totalAt(trace, count, total) {
    if (count === 0 || trace === NONE) return 0;
    const own = count - this.traces.seen[trace];
    return own === 0 ? this.startTotal[trace] : total[this.first[trace] + own - 1];
  }

  // The score with which a trace began; null before any thought.
  startValue(trace) {
    const { parent, seen } = this.traces;
    if (seen[trace] === 0) return null;
    const own = seen[trace] - seen[parent[trace]];
    return own === 0 ? this.startValue(parent[trace]) : this.thoughts.value[this.first[parent[trace]] + own - 1];
  }

  score(trace) {
    const end = this.first[trace + 1];
    return end > this.first[trace] ? this.thoughts.value[end - 1] : this.startValue(trace);
  }

  // Where the line of a trace ends: its last token, or the end of the log.
  end(trace) {
    const ended = this.traces.ended[trace];
    return ended === NONE ? this.last : ended;
  }

  stateName(trace) { return this.states[this.traces.state[trace]]; }

  // Ghosts that were pruned later were evicted first: their line went on without words.
  wasGhost(trace) {
    const { ended, left } = this.traces;
    return this.stateName(trace) === "ghost" || (ended[trace] !== NONE && left[trace] > ended[trace]);
  }

  lineage(trace) {
    const path = [];
    for (let at = trace; at !== NONE; at = this.traces.parent[at]) path.push(at);
    return path.reverse();
  }

  // All thoughts of a trace, inherited ones first, as [thought index, owner].
  thoughtsOf(trace) {
    const { parent, seen } = this.traces;
    const found = seen[trace] > 0 ? this.thoughtsOf(parent[trace]).slice(0, seen[trace]) : [];
    for (let i = this.first[trace]; i < this.first[trace + 1]; i++) found.push([i, trace]);
    return found;
  }

  scoreRange() {
    const values = Float64Array.from({ length: this.size }, (_, trace) => this.score(trace) ?? NaN)
      .filter((value) => !Number.isNaN(value)).sort();
    if (values.length === 0) return [0, 1];
    const at = (share) => values[Math.round(share * (values.length - 1))];
    const [low, high] = [at(0.02), at(0.98)];
    return high - low > 1e-6 ? [low, high] : [low - 0.5, high + 0.5];
  }

  // The bytes of a trace's whole text: its parent's up to the branch, then its own.
  bytes(trace) {
    if (!this.known.has(trace)) {
      if (this.known.size >= MOST_TEXTS) this.known.delete(this.known.keys().next().value);
      this.known.set(trace, this.assemble(trace));
    }
    return this.known.get(trace);
  }

  async assemble(trace) {
    const own = await this.ownBytes(trace);
    const parent = this.traces.parent[trace];
    if (parent === NONE) return own;
    const inherited = (await this.bytes(parent)).subarray(0, this.traces.cut[trace]);
    const all = new Uint8Array(inherited.length + own.length);
    all.set(inherited);
    all.set(own, inherited.length);
    return all;
  }

  async ownBytes(trace) {
    this.storeText ??= this.store.textContent;
    const packed = atob(this.storeText.slice(this.textStart[trace], this.textStart[trace + 1]));
    const deflated = Uint8Array.from(packed, (char) => char.charCodeAt(0));
    const stream = new Blob([deflated]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Uint8Array(await new Response(stream).arrayBuffer());
  }
}

// Where each group begins, given the groups' sizes; one more entry for the end.
function starts(sizes) {
  const found = new Int32Array(sizes.length + 1);
  sizes.forEach((size, index) => { found[index + 1] = found[index] + size; });
  return found;
}

// Running sums, beginning again with every group.
function sums(deltas, first) {
  const found = new Int32Array(deltas.length);
  for (let group = 0; group + 1 < first.length; group++) {
    for (let i = first[group], sum = 0; i < first[group + 1]; i++) found[i] = sum += deltas[i];
  }
  return found;
}

// A cut inside a character moves to its beginning.
function wholeCharacter(bytes, at) {
  while (at > 0 && at < bytes.length && (bytes[at] & 0xc0) === 0x80) at--;
  return at;
}
