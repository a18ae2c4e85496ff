// What can be folded: islands, families of one root where there is one island, and bundles of either where even they
// are too many to see.

class Group {
  constructor(kind, first, last, traces, parts = []) {
    Object.assign(this, { kind, first, last, traces, parts, isOpen: false }); // no parts: its traces are its rows
  }

  get range() { return this.first === this.last ? String(this.first) : `${this.first}–${this.last}`; }
  get name() { return `${this.kind}${this.first === this.last ? "" : "s"} ${this.range}`; }
  get canFold() { return this.traces.length > 1; }
}

// Families stay together: children right below their parent, the latest nearest, so that branches do not cross.
function familyOf(run, root) {
  const found = [], stack = [root];
  while (stack.length > 0) {
    const trace = stack.pop();
    found.push(trace);
    stack.push(...run.children[trace]);
  }
  return found;
}

// `room`: how many groups can be told apart at once.
function groupsOf(run, isShown, room) {
  const families = run.roots.map((root) => new Group("root", root, root, familyOf(run, root).filter(isShown)))
    .filter((family) => family.traces.length > 0);
  return bundled(run.numIslands > 1 ? islandsOf(run, families, room) : families, room);
}

function islandsOf(run, families, room) {
  const members = new Map();
  for (const family of families) {
    const island = run.traces.island[family.first];
    members.set(island, [...(members.get(island) ?? []), family]);
  }
  return [...members.keys()].sort((a, b) => a - b).map((island) => {
    const own = members.get(island), traces = own.flatMap((family) => family.traces);
    return new Group("island", island, island, traces, traces.length > room && own.length > 1 ? bundled(own, room) : []);
  });
}

function bundled(groups, room) {
  const size = Math.ceil(groups.length / Math.max(room, 1));
  if (size <= 1) return groups;
  const found = [];
  for (let at = 0; at < groups.length; at += size) {
    const part = groups.slice(at, at + size);
    found.push(new Group(part[0].kind, part[0].first, part.at(-1).last, part.flatMap((each) => each.traces), part));
  }
  return found;
}

// The rows on show: { trace, groups } or { group, groups }, `groups` being those around it, outermost first.
function rowsOf(groups, around = []) {
  return groups.flatMap((group) => {
    if (!group.isOpen && group.canFold) return [{ trace: NONE, group, groups: around }];
    const within = [...around, group];
    return group.parts.length > 0 ? rowsOf(group.parts, within)
      : group.traces.map((trace) => ({ trace, group: null, groups: within }));
  });
}

function everyGroup(groups) { return groups.flatMap((group) => [group, ...everyGroup(group.parts)]); }

function setOpen(groups, isOpen) {
  for (const group of groups) {
    group.isOpen = isOpen;
    setOpen(group.parts, isOpen);
  }
}

// Answers of a group's completed traces, the most frequent first: [answer, count, index of its vote].
function answersIn(run, group) {
  const counts = new Map();
  for (const trace of group.traces) {
    const vote = run.voteOf[trace];
    if (vote !== NONE) counts.set(vote, (counts.get(vote) ?? 0) + 1);
  }
  return [...counts].sort((a, b) => b[1] - a[1] || a[0] - b[0]).map(([vote, count]) => [run.votes[vote].answer, count, vote]);
}

function completedIn(run, group) { return group.traces.filter((trace) => run.stateName(trace) === "finished").length; }
