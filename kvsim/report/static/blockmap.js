"use strict";
// The block map: reads the recording embedded in the page, draws it, and plays it. No library, no network.
(() => {
  const PALETTE = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#B8A800"];
  const KEYFRAME_EVERY = 16;
  const MAX_CHIPS = 600;
  const MAX_LIFE_LINES = 14;
  const MAX_COPY_LINES = 24;
  const LIFE_WORDS = {
    t: (e) => `taken by ${e.request}`,
    "+": (e) => `${e.request} shares it`,
    "-": (e) => `${e.request} lets go of it`,
    c: (e) => `copied to block ${e.other}, for ${e.request}`,
    C: (e) => `filled with a copy of block ${e.source}`,
    k: () => "its text is kept for the prefix cache",
    h: (e) => `${e.request} finds its text in the prefix cache`,
    e: () => "its cached text is evicted",
    o: (e) => `swapped out to host block ${e.other}`,
    i: (e) => `swapped in from host block ${e.other}`,
    f: () => "free",
  };

  const sums = (differences) => {
    let total = 0;
    return differences.map((difference) => (total += difference));
  };
  const number = (value) => value.toLocaleString("en-US");
  const counted = (value, noun) => `${number(value)} ${noun}${value === 1 ? "" : "s"}`;
  const percent = (part, whole) => `${((100 * part) / whole).toFixed(1)} %`;
  const make = (tag, className, text) => {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  };

  /** One run's frames. Sequences are numbers; `sequences[number]` says whose they are. */
  class Recording {
    constructor(raw) {
      Object.assign(this, raw);
      this.times = sums(raw.t_ns);
      this.steps = sums(raw.step);
      this.isPaged = raw.kind === "paged";
      this.endNs = this.times[this.times.length - 1];
      this.keyframes = [];
      this.cursor = { index: -1, live: new Map(), idle: new Set(), lost: new Set(), copies: [] };
      for (let index = 0; index < this.times.length; index += 1) {
        this.advance();
        if (index % KEYFRAME_EVERY === 0) this.keyframes.push(copyOf(this.cursor));
      }
    }

    /** Move the cursor to the next frame. */
    advance() {
      const state = this.cursor;
      state.index += 1;
      const [tables, gone, tokens, idle, lost, copies, ended] = this.frames[state.index];
      gone.forEach((seq) => state.live.delete(seq));
      tables.forEach((change) => this.apply(state.live, change));
      let place = 0;
      for (const row of state.live.values()) {
        row.tokens += tokens[place];
        place += 1;
      }
      ended.forEach((seq) => (state.live.get(seq).ended = true));
      merge(state.idle, idle);
      merge(state.lost, lost);
      state.copies = copies;
    }

    apply(live, change) {
      const [seq, first, second, third] = change;
      const before = live.get(seq);
      if (this.isPaged) {
        const table = before ? before.table.slice(0, first) : [];
        let id = 0;
        for (const difference of change.slice(2)) table.push((id += difference));
        live.set(seq, { table, tokens: before ? before.tokens : 0 });
      } else {
        live.set(seq, { start: first, length: second, size: third, tokens: before ? before.tokens : 0, ended: before?.ended ?? false });
      }
    }

    /** The state at frame `index`; valid until the next call. */
    at(index) {
      const wanted = Math.max(0, Math.min(index, this.times.length - 1));
      if (wanted < this.cursor.index || wanted - this.cursor.index > KEYFRAME_EVERY) {
        this.cursor = copyOf(this.keyframes[Math.floor(wanted / KEYFRAME_EVERY)]);
      }
      while (this.cursor.index < wanted) this.advance();
      return this.cursor;
    }

    /** The last frame at or before `timeNs`. */
    indexAt(timeNs) {
      let low = 0;
      let high = this.times.length - 1;
      while (low < high) {
        const middle = Math.ceil((low + high) / 2);
        if (this.times[middle] <= timeNs) low = middle;
        else high = middle - 1;
      }
      return low;
    }

    requestOf(seq) {
      return this.requests[this.sequences[seq][0]];
    }

    label(seq) {
      const sample = this.sequences[seq][1];
      return sample ? `request ${this.requestOf(seq)} (sample ${sample})` : `request ${this.requestOf(seq)}`;
    }

    /** Per block, by its place on the map: who names it, how full it is, and as which entries. */
    blocks(state) {
      if (this.shown?.index === state.index) return this.shown.blocks;
      const found = new Map();
      for (const [seq, row] of state.live) {
        const inTable = new Set();
        row.table.forEach((id, logical) => {
          const fill = Math.max(0, Math.min(this.block_size, row.tokens - logical * this.block_size));
          let block = found.get(id);
          if (!block) found.set(id, (block = { owners: [], fill: 0, logical: [] }));
          block.fill = Math.max(block.fill, fill);
          if (inTable.has(id)) {
            block.logical[block.logical.length - 1] = logical;
            return;
          }
          inTable.add(id);
          block.owners.push(seq);
          block.logical.push(logical);
        });
      }
      this.shown = { index: state.index, blocks: found };
      return found;
    }

    /** Share of the memory that holds tokens, frame by frame. */
    get storedShares() {
      this.stored ??= this.times.map((_, index) => {
        const { capacity, parts } = this.shares(this.at(index));
        return parts.stored / capacity;
      });
      return this.stored;
    }

    /** The sequence whose extent holds slot `address`, or undefined. */
    regionAt(state, address) {
      for (const [seq, row] of state.live) {
        if (row.start <= address && address < row.start + row.size) return seq;
      }
      return undefined;
    }

    /** A region's slots: filled, to be filled, never used (of an ended request none will be read). */
    partsOf(seq, row) {
      const final = Math.min(row.length, Math.max(row.tokens, this.sequences[seq][3]));
      if (row.ended) return { stored: 0, reserved: 0, unused: row.length, final: row.tokens };
      return { stored: row.tokens, reserved: final - row.tokens, unused: row.length - final, final };
    }

    /** Slots by what they are for, as the ledger counts them. */
    shares(state) {
      const capacity = this.num_blocks * this.block_size;
      const parts = { stored: 0, reserved: 0, unused: 0, rounding: 0, idle: state.idle.size * this.block_size };
      let taken = 0;
      if (this.isPaged) {
        const blocks = this.blocks(state);
        for (const block of blocks.values()) parts.stored += block.fill;
        taken = (blocks.size + state.lost.size) * this.block_size;
        let toFill = 0;
        for (const [seq, row] of state.live) {
          const empty = Math.max(0, row.table.length * this.block_size - row.tokens);
          toFill += Math.min(empty, Math.max(0, this.sequences[seq][3] - row.tokens));
        }
        parts.reserved = Math.min(toFill, taken - parts.stored);
        parts.unused = taken - parts.stored - parts.reserved;
      } else {
        for (const [seq, row] of state.live) {
          const { stored, reserved, unused } = this.partsOf(seq, row);
          parts.stored += stored;
          parts.reserved += reserved;
          parts.unused += unused;
          parts.rounding += row.size - row.length;
          taken += row.size;
        }
      }
      parts.free = capacity - taken - parts.idle;
      return { capacity, parts };
    }

    /** What happened to one block, from the journal; null if the journal was too long to embed. */
    life(id) {
      if (!this.lives) return null;
      if (!this.lifeIndex) this.indexLives();
      return this.lifeIndex.get(id) || [];
    }

    indexLives() {
      const { t_us, code, block, request, other, more_requests } = this.lives;
      const [times, ids, owners] = [sums(t_us), sums(block), sums(request)];
      const names = [...this.requests, ...more_requests];
      const others = new Map(other);
      this.lifeIndex = new Map();
      const add = (id, event) => {
        if (!this.lifeIndex.has(id)) this.lifeIndex.set(id, []);
        this.lifeIndex.get(id).push(event);
      };
      for (let index = 0; index < times.length; index += 1) {
        const event = { us: times[index], code: code[index], request: `request ${names[owners[index]]}` };
        if (others.has(index)) event.other = others.get(index);
        add(ids[index], event);
        if (event.code === "c") add(event.other, { ...event, code: "C", source: ids[index] });
      }
    }

    /** As `life`, but from the frames: spans of frames in which the same sequences held the block. */
    lifeFromFrames(id) {
      const spans = [];
      let last = "";
      for (let index = 0; index < this.times.length; index += 1) {
        const state = this.at(index);
        const holders = [];
        for (const [seq, row] of state.live) {
          if (this.isPaged ? row.table.includes(id) : row.start <= id && id < row.start + row.size) holders.push(this.label(seq));
        }
        const text = holders.join(", ") || (state.idle.has(id) ? "cached, idle" : "free");
        if (text !== last) spans.push({ us: this.times[index] / 1000, text: `seen: ${text}` });
        last = text;
      }
      return spans;
    }
  }

  function copyOf(state) {
    const live = new Map();
    for (const [seq, row] of state.live) live.set(seq, { ...row });
    return { ...state, live, idle: new Set(state.idle), lost: new Set(state.lost) };
  }

  function merge(set, [added, removed]) {
    sums(added).forEach((id) => set.add(id));
    sums(removed).forEach((id) => set.delete(id));
  }

  /** One memory on the screen: a canvas, its figures, and the block under the pointer. */
  class Pane {
    constructor(host, recordings, initial, player, slotsPerCell) {
      this.player = player;
      this.recordings = recordings;
      this.recording = recordings[initial];
      this.slotsPerCell = slotsPerCell;
      this.frame = 0;
      this.focus = null;
      this.build(host, initial);
      this.listen();
    }

    build(host, initial) {
      this.root = make("figure", "pane");
      const caption = make("figcaption");
      if (this.recordings.length > 1) {
        const label = make("label", "", "Memory of ");
        this.choice = make("select");
        this.recordings.forEach((recording, index) => {
          const option = make("option", "", recording.engine);
          option.value = index;
          this.choice.append(option);
        });
        this.choice.value = initial;
        this.choice.setAttribute("aria-label", "Engine shown in this pane");
        label.append(this.choice);
        caption.append(label);
      } else {
        caption.append(make("strong", "", this.recording.engine));
      }
      this.counts = make("span", "counts");
      caption.append(this.counts);
      this.bar = make("div", "bar");
      this.bar.setAttribute("role", "img");
      this.canvas = make("canvas");
      this.canvas.tabIndex = 0;
      this.canvas.setAttribute("role", "application");
      this.canvas.setAttribute("aria-roledescription", "block map");
      this.copies = make("p", "copies");
      this.readout = make("div", "readout");
      this.readout.setAttribute("aria-live", "polite");
      this.root.append(caption, this.bar, this.canvas, this.copies, this.readout);
      host.append(this.root);
      this.describe(null);
    }

    listen() {
      if (this.choice) {
        this.choice.addEventListener("change", () => {
          this.recording = this.recordings[Number(this.choice.value)];
          this.focus = null;
          this.player.rebuildClock();
        });
      }
      this.canvas.addEventListener("pointermove", (event) => this.point(event));
      this.canvas.addEventListener("pointerleave", () => this.hover(null));
      this.canvas.addEventListener("click", (event) => {
        this.point(event);
        this.choose();
      });
      this.canvas.addEventListener("focus", () => {
        if (this.focus === null) this.hover(this.firstUsed());
      });
      this.canvas.addEventListener("keydown", (event) => this.key(event));
      new ResizeObserver(() => this.draw()).observe(this.root);
    }

    get numCells() {
      const { recording } = this;
      return recording.isPaged ? recording.num_blocks : Math.ceil(recording.num_blocks / this.slotsPerCell);
    }

    firstUsed() {
      const state = this.recording.at(this.frame);
      for (const row of state.live.values()) {
        if (this.recording.isPaged && row.table.length) return this.cellOf(row.table[0]);
        if (!this.recording.isPaged) return this.cellOf(row.start);
      }
      return 0;
    }

    /** Block id (contiguous: first slot) of a cell, and the cell of one. */
    idOf(cell) {
      return this.recording.isPaged ? cell + this.recording.first_block : cell * this.slotsPerCell;
    }

    cellOf(id) {
      return this.recording.isPaged ? id - this.recording.first_block : Math.floor(id / this.slotsPerCell);
    }

    point(event) {
      const box = this.canvas.getBoundingClientRect();
      const { size, columns } = this.layout;
      const column = Math.floor((event.clientX - box.left) / size);
      const cell = Math.floor((event.clientY - box.top) / size) * columns + column;
      const inside = column >= 0 && column < columns && cell >= 0 && cell < this.numCells;
      this.hover(inside ? cell : null);
    }

    key(event) {
      const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.layout.columns, ArrowDown: this.layout.columns };
      const last = this.numCells - 1;
      if (event.key in moves) this.hover(Math.max(0, Math.min(last, (this.focus ?? 0) + moves[event.key])));
      else if (event.key === "Home") this.hover(0);
      else if (event.key === "End") this.hover(last);
      else if (event.key === "Enter") this.choose();
      else if (event.key === "Escape") this.player.select(null);
      else return;
      event.preventDefault();
    }

    hover(cell) {
      if (cell === this.focus) return;
      this.focus = cell;
      this.describe(cell);
      this.draw();
    }

    /** Choose the request that owns the focused block. */
    choose() {
      if (this.focus === null) return;
      const owner = this.ownersOf(this.idOf(this.focus))[0];
      this.player.select(owner === undefined ? null : this.recording.requestOf(owner));
    }

    ownersOf(id) {
      const state = this.recording.at(this.frame);
      if (this.recording.isPaged) return this.recording.blocks(state).get(id)?.owners ?? [];
      const seq = this.recording.regionAt(state, id);
      return seq === undefined ? [] : [seq];
    }

    show(timeNs) {
      this.frame = this.recording.indexAt(timeNs);
      this.count();
      this.draw();
      if (this.focus !== null && !this.player.isPlaying) this.describe(this.focus);
    }

    count() {
      const { recording, frame } = this;
      const state = recording.at(frame);
      const { capacity, parts } = recording.shares(state);
      const people = `${number(recording.running[frame])} running, ${number(recording.waiting[frame])} waiting`;
      const swapped = recording.swapped[frame] ? `, ${number(recording.swapped[frame])} swapped out` : "";
      const isOver = frame === recording.times.length - 1 ? "; the run is over" : "";
      this.counts.textContent = `${people}${swapped}; ${percent(parts.stored, capacity)} of the memory holds tokens${isOver}`;
      this.drawBar(parts, capacity);
      const shown = state.copies.slice(-6).map(([from, to]) => `${from} → ${to}`);
      const kind = recording.isPaged ? "blocks copied" : "regions copied or moved";
      this.copies.textContent = state.copies.length
        ? `${number(state.copies.length)} ${kind} since the frame before: ${state.copies.length > 6 ? "… " : ""}${shown.join(", ")}`
        : "";
      this.canvas.setAttribute(
        "aria-label",
        `Memory of ${recording.engine} at ${this.player.timeText()}: ${this.counts.textContent}. Arrow keys move over the ` +
          `${recording.isPaged ? "blocks" : "address space"}, Enter chooses the request under the cursor.`,
      );
    }

    drawBar(parts, capacity) {
      const words = {
        stored: "tokens", reserved: "reserved", unused: "never used", rounding: "rounding", idle: "cached, idle",
        free: this.recording.isPaged ? "free" : "holes",
      };
      this.bar.replaceChildren();
      const texts = [];
      for (const [part, slots] of Object.entries(parts)) {
        if (!slots) continue;
        const piece = make("span", `part ${part}`);
        piece.style.width = `${(100 * slots) / capacity}%`;
        piece.title = `${words[part]}: ${percent(slots, capacity)}`;
        if (slots / capacity > 0.17) piece.textContent = `${words[part]} ${Math.round((100 * slots) / capacity)} %`;
        texts.push(piece.title);
        this.bar.append(piece);
      }
      this.bar.setAttribute("aria-label", texts.join(", "));
    }

    /** The block at a cell in words, and its life. */
    describe(cell) {
      this.readout.replaceChildren();
      if (cell === null) {
        this.readout.append(make("p", "hint", "Point at a block, or move there with the arrow keys, to see its life."));
        return;
      }
      const id = this.idOf(cell);
      this.readout.append(make("p", "now", this.recording.isPaged ? this.blockText(id) : this.slotText(id)));
      clearTimeout(this.waiting);
      if (this.recording.lives) this.tellLife(id);
      // Read from the frames it takes a while: only for a block at which the pointer rests.
      else this.waiting = setTimeout(() => this.focus === cell && this.tellLife(id), 250);
    }

    tellLife(id) {
      const lines = this.lifeLines(id);
      this.readout.querySelector(".life")?.remove();
      if (!lines.length) return;
      const now = this.recording.times[this.frame] / 1000;
      const list = make("ol", "life");
      const upto = lines.filter((line) => line.us <= now).length;
      const first = Math.max(0, Math.min(upto - MAX_LIFE_LINES + 4, lines.length - MAX_LIFE_LINES));
      if (first > 0) list.append(make("li", "hint", `${number(first)} earlier`));
      lines.slice(first, first + MAX_LIFE_LINES).forEach((line) => {
        list.append(make("li", line.us <= now ? "" : "future", `${this.player.format(line.us * 1000)}  ${line.text}`));
      });
      const rest = lines.length - first - MAX_LIFE_LINES;
      if (rest > 0) list.append(make("li", "hint", `${number(rest)} later`));
      this.readout.append(list);
    }

    lifeLines(id) {
      const { recording } = this;
      let start = id;
      if (!recording.isPaged) {
        const seq = recording.regionAt(recording.at(this.frame), id);
        if (seq === undefined) return [];
        start = recording.at(this.frame).live.get(seq).start;
      }
      const events = recording.life(start);
      if (events) return events.map((event) => ({ us: event.us, text: LIFE_WORDS[event.code](event) }));
      const lines = recording.lifeFromFrames(start);
      recording.at(this.frame);
      return lines;
    }

    blockText(id) {
      const { recording } = this;
      const state = recording.at(this.frame);
      const block = recording.blocks(state).get(id);
      if (!block) {
        if (state.idle.has(id)) return `Block ${id}: cached and idle. Nobody uses it; its text may be found again.`;
        return state.lost.has(id) ? `Block ${id}: lost. References were leaked.` : `Block ${id}: free.`;
      }
      const [first] = block.logical;
      const from = first * recording.block_size;
      const copied = state.copies.find(([, to]) => to === id);
      const text = `Block ${id}: ${block.fill} of ${recording.block_size} slots filled, ${block.fill > 1 ? `tokens ${from} to ${from + block.fill - 1}` : `token ${from}`} of `;
      const shared = block.owners.length > 1 ? ` Shared: ref count ${block.owners.length}.` : "";
      const names = block.owners.slice(0, 6).map((seq) => recording.label(seq)).join(", ");
      const more = block.owners.length > 6 ? ` and ${block.owners.length - 6} more` : "";
      return `${text}${names}${more} (logical block ${first}).${shared}${copied ? ` Just copied from block ${copied[0]}.` : ""}`;
    }

    slotText(address) {
      const { recording } = this;
      const state = recording.at(this.frame);
      const seq = recording.regionAt(state, address);
      if (seq === undefined) return `Slot ${number(address)}: a hole; no request owns it.`;
      const row = state.live.get(seq);
      const { stored, reserved, unused } = recording.partsOf(seq, row);
      const ended = row.ended ? " It has ended, and keeps the region until its batch ends." : "";
      const rounding = row.size > row.length ? `, and ${number(row.size - row.length)} more by rounding` : "";
      return (
        `Slot ${number(address)}: in the region of ${recording.label(seq)}, ${number(row.length)} slots from ${number(row.start)}${rounding}. ` +
        `${number(stored)} hold tokens to be read, ${number(reserved)} are reserved for tokens to come, ` +
        `${number(unused)} are of no use.${ended}`
      );
    }

    fit() {
      const width = Math.max(120, this.root.clientWidth);
      const height = this.player.panes.length > 1 ? 560 : 520;
      let size = 22;
      while (size > 1 && Math.ceil(this.numCells / Math.floor(width / size)) * size > height) size -= 1;
      const columns = Math.floor(width / size);
      return { size, columns, rows: Math.ceil(this.numCells / columns), width };
    }

    draw() {
      this.layout = this.fit();
      const { size, columns, rows } = this.layout;
      const scale = window.devicePixelRatio || 1;
      const [width, height] = [columns * size, rows * size];
      this.canvas.width = Math.round(width * scale);
      this.canvas.height = Math.round(height * scale);
      this.canvas.style.width = `${width}px`;
      this.canvas.style.height = `${height}px`;
      const paint = this.canvas.getContext("2d");
      paint.setTransform(scale, 0, 0, scale, 0, 0);
      const colors = this.player.colors;
      const state = this.recording.at(this.frame);
      if (this.recording.isPaged) this.drawBlocks(paint, state, colors);
      else this.drawRegions(paint, state, colors);
      if (this.focus !== null) this.outline(paint, this.focus, colors.ink, 2);
    }

    corner(cell) {
      const { size, columns } = this.layout;
      return [(cell % columns) * size, Math.floor(cell / columns) * size];
    }

    outline(paint, cell, color, width) {
      const [x, y] = this.corner(cell);
      paint.strokeStyle = color;
      paint.lineWidth = width;
      paint.strokeRect(x + width / 2 - 0.5, y + width / 2 - 0.5, this.layout.size - width + 0.5, this.layout.size - width + 0.5);
    }

    colorOf(seq) {
      return PALETTE[this.recording.sequences[seq][0] % PALETTE.length];
    }

    isDimmed(seqs) {
      const chosen = this.player.chosen;
      return chosen !== null && !seqs.some((seq) => this.recording.requestOf(seq) === chosen);
    }

    drawBlocks(paint, state, colors) {
      const { recording } = this;
      const { size } = this.layout;
      const side = size >= 5 ? size - 1 : size;
      paint.fillStyle = colors.free;
      if (side < size) {
        for (let cell = 0; cell < this.numCells; cell += 1) paint.fillRect(...this.corner(cell), side, side);
      } else {
        // Without gaps between them the cells are a rectangle, whose last row may be short.
        const [x, y] = this.corner(this.numCells);
        paint.fillRect(0, 0, this.layout.columns * size, y);
        paint.fillRect(0, y, x, size);
      }
      this.drawIdle(paint, state.idle, side, colors);
      for (const id of state.lost) this.drawUnused(paint, ...this.corner(this.cellOf(id)), side, side, colors);
      const blocks = recording.blocks(state);
      for (const [id, block] of blocks) this.drawBlock(paint, this.corner(this.cellOf(id)), side, block, colors);
      state.copies.forEach(([from, to]) => {
        if (blocks.has(to)) this.drawCopy(paint, state, this.cellOf(from), this.cellOf(to), colors);
      });
      if (this.player.chosen !== null) this.drawChosen(paint, blocks, side, colors);
    }

    drawBlock(paint, [x, y], side, block, colors) {
      const color = this.colorOf(block.owners[0]);
      const height = Math.round((side * block.fill) / this.recording.block_size);
      const strength = this.isDimmed(block.owners) ? 0.25 : 1;
      paint.fillStyle = color;
      paint.globalAlpha = 0.3 * strength;
      paint.fillRect(x, y, side, side);
      paint.globalAlpha = strength;
      paint.fillRect(x, y + side - height, side, height);
      if (block.owners.length > 1) {
        const radius = Math.max(1, side * 0.24);
        paint.fillStyle = colors.mark;
        paint.strokeStyle = colors.markEdge;
        paint.lineWidth = 1;
        paint.beginPath();
        paint.arc(x + side / 2, y + side / 2, radius, 0, 2 * Math.PI);
        paint.fill();
        if (side >= 6) paint.stroke();
      }
      paint.globalAlpha = 1;
    }

    drawIdle(paint, ids, side, colors) {
      const corners = [...ids].map((id) => this.corner(this.cellOf(id)));
      paint.fillStyle = colors.idle;
      for (const [x, y] of corners) paint.fillRect(x, y, side, side);
      if (side < 4) return;
      paint.fillStyle = colors.idleMark;
      for (const [x, y] of corners) paint.fillRect(x + 1, y + Math.floor(side / 2), side - 2, 1);
    }

    drawCopy(paint, state, from, to, colors) {
      this.outline(paint, to, colors.ink, 3);
      if (state.copies.length > MAX_COPY_LINES) return;
      const half = this.layout.size / 2;
      const [x0, y0] = this.corner(from);
      const [x1, y1] = this.corner(to);
      paint.strokeStyle = colors.ink;
      paint.lineWidth = 1;
      paint.setLineDash([3, 2]);
      paint.beginPath();
      paint.moveTo(x0 + half, y0 + half);
      paint.lineTo(x1 + half, y1 + half);
      paint.stroke();
      paint.setLineDash([]);
    }

    drawChosen(paint, blocks, side, colors) {
      const { recording } = this;
      paint.textAlign = "center";
      paint.textBaseline = "middle";
      paint.font = `bold ${Math.min(11, Math.floor(side * 0.62))}px system-ui, sans-serif`;
      for (const [id, block] of blocks) {
        const place = block.owners.findIndex((seq) => recording.requestOf(seq) === this.player.chosen);
        if (place < 0) continue;
        const cell = this.cellOf(id);
        this.outline(paint, cell, colors.ink, side >= 8 ? 2 : 1);
        if (side < 13) continue;
        const [x, y] = this.corner(cell);
        paint.lineWidth = 2.5;
        paint.strokeStyle = colors.page;
        paint.strokeText(block.logical[place], x + side / 2, y + side / 2 + 0.5);
        paint.fillStyle = colors.ink;
        paint.fillText(block.logical[place], x + side / 2, y + side / 2 + 0.5);
      }
    }

    /** Rectangles that cover the slots from `start` to `end` in rows. */
    *pieces(start, end) {
      const { size, columns } = this.layout;
      const perRow = columns * this.slotsPerCell;
      for (let from = start; from < end; ) {
        const row = Math.floor(from / perRow);
        const to = Math.min(end, (row + 1) * perRow);
        const x = ((from - row * perRow) / this.slotsPerCell) * size;
        yield [x, row * size, ((to - from) / this.slotsPerCell) * size, size > 3 ? size - 1 : size];
        from = to;
      }
    }

    drawRegions(paint, state, colors) {
      const { recording } = this;
      paint.fillStyle = colors.free;
      for (const piece of this.pieces(0, recording.num_blocks)) paint.fillRect(...piece);
      for (const [seq, row] of state.live) {
        const strength = this.isDimmed([seq]) ? 0.25 : 1;
        const stored = row.start + row.tokens;
        const final = row.start + recording.partsOf(seq, row).final;
        paint.fillStyle = this.colorOf(seq);
        paint.globalAlpha = row.ended ? 0.35 * strength : strength;
        for (const piece of this.pieces(row.start, stored)) {
          paint.fillRect(...piece);
          if (row.ended) this.hatch(paint, ...piece, colors.unusedMark, 1);
        }
        paint.fillStyle = this.colorOf(seq);
        paint.globalAlpha = 0.35 * strength;
        for (const piece of this.pieces(stored, final)) paint.fillRect(...piece);
        paint.globalAlpha = strength;
        for (const piece of this.pieces(final, row.start + row.length)) this.drawUnused(paint, ...piece, colors);
        for (const piece of this.pieces(row.start + row.length, row.start + row.size)) this.drawRounding(paint, ...piece, colors);
        paint.globalAlpha = 1;
        this.drawEdge(paint, row.start, colors);
        if (this.player.chosen !== null && recording.requestOf(seq) === this.player.chosen) {
          paint.strokeStyle = colors.ink;
          paint.lineWidth = 2;
          for (const [x, y, w, h] of this.pieces(row.start, row.start + row.size)) paint.strokeRect(x + 1, y + 1, Math.max(1, w - 2), h - 2);
        }
      }
      state.copies.forEach(([from, to]) => this.drawCopy(paint, state, this.cellOf(from), this.cellOf(to), colors));
    }

    drawEdge(paint, start, colors) {
      const [[x, y, , height]] = this.pieces(start, start + 1);
      paint.fillStyle = colors.ink;
      paint.fillRect(x, y, 1, height);
    }

    drawUnused(paint, x, y, width, height, colors) {
      paint.fillStyle = colors.unused;
      paint.fillRect(x, y, width, height);
      this.hatch(paint, x, y, width, height, colors.unusedMark, 1);
    }

    drawRounding(paint, x, y, width, height, colors) {
      paint.fillStyle = colors.rounding;
      paint.fillRect(x, y, width, height);
      this.hatch(paint, x, y, width, height, colors.unusedMark, -1);
    }

    hatch(paint, x, y, width, height, color, slope) {
      if (height < 4) return;
      paint.save();
      paint.beginPath();
      paint.rect(x, y, width, height);
      paint.clip();
      paint.strokeStyle = color;
      paint.lineWidth = 1;
      paint.beginPath();
      const offset = x - (x % 6);
      for (let at = offset - height; at < x + width + height; at += 6) {
        paint.moveTo(at, slope > 0 ? y + height : y);
        paint.lineTo(at + height, slope > 0 ? y : y + height);
      }
      paint.stroke();
      paint.restore();
    }
  }

  /** The clock all panes share, its controls, and the chosen request. */
  class Player {
    constructor(root, recordings) {
      this.root = root;
      this.chosen = null;
      this.isPlaying = false;
      this.index = 0;
      this.panes = [];
      this.find();
      this.readColors();
      const paged = recordings.find((recording) => recording.isPaged);
      const slotsPerCell = this.slotsPerCell(recordings, paged ? paged.block_size : 16);
      const host = root.querySelector(".panes");
      const shown = recordings.length > 1 ? [0, 1] : [0];
      shown.forEach((initial) => this.panes.push(new Pane(host, recordings, initial, this, slotsPerCell)));
      host.classList.toggle("two", shown.length > 1);
      this.fillRequests(recordings);
      this.listen();
      this.rebuildClock();
      this.seek(this.busiest());
      this.isUntouched = true;
    }

    /** The instant at which the first memory holds most tokens: what the page opens with. */
    busiest() {
      const [{ recording }] = this.panes;
      const shares = recording.storedShares;
      return this.clock.indexOf(recording.times[shares.indexOf(Math.max(...shares))]);
    }

    find() {
      this.slider = this.root.querySelector("#clock");
      this.play = this.root.querySelector("#play");
      this.speed = this.root.querySelector("#speed");
      this.time = this.root.querySelector("#time");
      this.requests = this.root.querySelector("#request");
      this.table = this.root.querySelector("#table");
      this.note = this.root.querySelector("#sampling");
      this.overview = this.root.querySelector("#overview");
      this.overviewText = this.root.querySelector("#overview-text");
    }

    /** The same cell stands for the same memory in every pane; of a lone contiguous run it holds what fits. */
    slotsPerCell(recordings, least) {
      if (recordings.some((recording) => recording.isPaged)) return least;
      const slots = Math.max(...recordings.map((recording) => recording.num_blocks));
      let size = slots <= 4096 ? 1 : least;
      while (slots / size > 8192) size *= 2;
      return size;
    }

    fillRequests(recordings) {
      const names = new Set(recordings.flatMap((recording) => recording.requests));
      for (const name of names) {
        const option = make("option", "", name);
        option.value = name;
        this.requests.append(option);
      }
    }

    listen() {
      this.slider.addEventListener("input", () => this.seek(Number(this.slider.value)));
      this.play.addEventListener("click", () => this.toggle());
      this.root.querySelector("#back").addEventListener("click", () => this.seek(this.index - 1));
      this.root.querySelector("#forward").addEventListener("click", () => this.seek(this.index + 1));
      this.overview.addEventListener("click", (event) => {
        const box = this.overview.getBoundingClientRect();
        const time = this.clock[0] + ((event.clientX - box.left) / box.width) * this.span;
        const later = this.clock.findIndex((tick) => tick > time);
        this.seek(later < 0 ? this.clock.length - 1 : Math.max(0, later - 1));
      });
      this.requests.addEventListener("change", () => this.select(this.requests.value === "" ? null : this.requests.value));
      document.addEventListener("keydown", (event) => {
        const tag = event.target.tagName;
        if (event.key !== " " || tag === "BUTTON" || tag === "SELECT" || tag === "SUMMARY" || tag === "A") return;
        event.preventDefault();
        this.toggle();
      });
      window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
        this.readColors();
        this.panes.forEach((pane) => pane.draw());
      });
    }

    readColors() {
      const style = getComputedStyle(document.documentElement);
      const read = (name) => style.getPropertyValue(name).trim();
      this.colors = {
        ink: read("--ink"), page: read("--page"), free: read("--free"), idle: read("--idle"), idleMark: read("--idle-mark"),
        unused: read("--unused"), unusedMark: read("--unused-mark"), rounding: read("--rounding"),
        mark: read("--shared"), markEdge: read("--shared-edge"),
      };
    }

    /** Every instant at which a pane that is shown has a frame. */
    rebuildClock() {
      const now = this.clock ? this.clock[this.index] : 0;
      const times = new Set(this.panes.flatMap((pane) => pane.recording.times));
      this.clock = [...times].sort((one, other) => one - other);
      this.slider.max = this.clock.length - 1;
      const next = this.clock.findIndex((time) => time >= now);
      this.describeSampling();
      this.drawOverview();
      this.seek(next < 0 ? this.clock.length - 1 : next);
    }

    get span() {
      return Math.max(1, this.clock[this.clock.length - 1] - this.clock[0]);
    }

    /** The whole run on a strip: how much of each memory holds tokens, and where the clock stands. */
    drawOverview() {
      const svg = (tag, attributes) => {
        const element = document.createElementNS(this.overview.namespaceURI, tag);
        Object.entries(attributes).forEach(([name, value]) => element.setAttribute(name, value));
        return element;
      };
      const x = (timeNs) => ((1000 * (timeNs - this.clock[0])) / this.span).toFixed(1);
      this.overview.replaceChildren();
      this.overviewText.replaceChildren("Share of the memory that holds tokens, over the whole run (click to go there): ");
      this.panes.forEach(({ recording }, place) => {
        const name = place ? "second" : "first";
        const points = recording.storedShares.map((share, index) => `H${x(recording.times[index])}V${(58 - 55 * share).toFixed(1)}`);
        this.overview.append(svg("path", { class: name, d: `M0 58${points.join("")}` }));
        this.overviewText.append(make("span", `key ${name}`), `${recording.engine} `);
      });
      this.marker = svg("line", { y1: 0, y2: 60 });
      this.overview.append(this.marker);
    }

    describeSampling() {
      const whole = (steps) => (steps === 1 ? "its only step is a frame" : `each of its ${number(steps)} steps is a frame`);
      const texts = this.panes.map(({ recording }) =>
        recording.every === 1
          ? `${recording.engine}: ${whole(recording.num_steps)}`
          : `${recording.engine}: sampled, one frame per ${number(recording.every)} of its ${number(recording.num_steps)} steps`,
      );
      const exact = this.panes.every(({ recording }) => recording.lives);
      const lives = exact ? "The life of a block lists all that happened to it, between frames too." : "The run is too long for every event, so the life of a block is what the frames show.";
      this.note.textContent = `${[...new Set(texts)].join("; ")}. ${lives}`;
    }

    format(timeNs) {
      const end = this.clock ? this.clock[this.clock.length - 1] : 1e9;
      return end >= 2e9 ? `${(timeNs / 1e9).toFixed(2)} s` : `${(timeNs / 1e6).toFixed(2)} ms`;
    }

    timeText() {
      return this.clock ? this.format(this.clock[this.index]) : "";
    }

    seek(index) {
      this.index = Math.max(0, Math.min(this.clock.length - 1, index));
      const timeNs = this.clock[this.index];
      this.played = timeNs;
      this.isUntouched = false;
      this.slider.value = this.index;
      const [{ recording }] = this.panes;
      const step = `step ${number(recording.steps[recording.indexAt(timeNs)])}`;
      const text = this.panes.length > 1 ? this.timeText() : `${this.timeText()}, ${step}`;
      this.time.textContent = text;
      const x = (1000 * (timeNs - this.clock[0])) / this.span;
      this.marker.setAttribute("x1", x);
      this.marker.setAttribute("x2", x);
      this.slider.setAttribute("aria-valuetext", text);
      this.panes.forEach((pane) => pane.show(timeNs));
      this.showTable();
    }

    toggle() {
      if (this.isPlaying) this.pause();
      else this.start();
    }

    start() {
      if (this.isUntouched || this.index === this.clock.length - 1) this.seek(0);
      this.isPlaying = true;
      this.play.textContent = "Pause";
      this.play.setAttribute("aria-pressed", "true");
      this.table.setAttribute("aria-live", "off");
      this.since = performance.now();
      requestAnimationFrame((now) => this.tick(now));
    }

    pause() {
      this.isPlaying = false;
      this.play.textContent = "Play";
      this.play.setAttribute("aria-pressed", "false");
      this.table.setAttribute("aria-live", "polite");
      this.panes.forEach((pane) => pane.focus !== null && pane.describe(pane.focus));
    }

    /** Simulated time runs evenly: the whole run in as many seconds as the speed says. */
    tick(now) {
      if (!this.isPlaying) return;
      const last = this.clock.length - 1;
      const rate = (this.clock[last] - this.clock[0]) / (1000 * Number(this.speed.value));
      const played = this.played + rate * Math.max(0, now - this.since);
      let index = this.index;
      while (index < last && this.clock[index + 1] <= played) index += 1;
      if (index !== this.index) this.seek(index);
      this.played = played;
      this.since = now;
      if (index === last) this.pause();
      else requestAnimationFrame((later) => this.tick(later));
    }

    select(request) {
      this.chosen = request;
      this.requests.value = request ?? "";
      this.panes.forEach((pane) => pane.draw());
      this.showTable();
    }

    /** The chosen request's block table at this instant, logical to physical; its region in contiguous memory. */
    showTable() {
      this.table.replaceChildren();
      if (this.chosen === null) {
        this.table.append(make("p", "hint", "Choose a request, or click one of its blocks: its table appears here, and its blocks light up."));
        return;
      }
      this.panes.forEach((pane) => {
        const { recording } = pane;
        const state = recording.at(pane.frame);
        const rows = [...state.live].filter(([seq]) => recording.requestOf(seq) === this.chosen);
        if (this.panes.length > 1) this.table.append(make("h4", "", recording.engine));
        if (!rows.length) this.table.append(make("p", "hint", `Request ${this.chosen} has no memory at this instant.`));
        rows.forEach(([seq, row]) => this.table.append(recording.isPaged ? this.tableOf(recording, state, seq, row) : this.regionOf(recording, seq, row)));
      });
    }

    tableOf(recording, state, seq, row) {
      const box = make("div", "table");
      const [, sample, prompt, final] = recording.sequences[seq];
      box.append(make("p", "", `Request ${this.chosen}, sample ${sample}: ${counted(row.tokens, "token")} stored in ${counted(row.table.length, "block")} (prompt ${number(prompt)}, ${number(final)} at its end). Logical → physical:`));
      const blocks = recording.blocks(state);
      const list = make("ol", "chips");
      row.table.slice(0, MAX_CHIPS).forEach((id, logical) => {
        const isShared = blocks.get(id).owners.length > 1;
        const fill = Math.max(0, Math.min(recording.block_size, row.tokens - logical * recording.block_size));
        const chip = make("li", isShared ? "shared" : "", `${logical} → ${id}`);
        chip.dataset.logical = logical;
        chip.dataset.block = id;
        chip.dataset.fill = fill;
        chip.title = `${fill} of ${recording.block_size} slots filled${isShared ? `, shared by ${blocks.get(id).owners.length} tables` : ""}`;
        chip.style.setProperty("--fill", `${(100 * fill) / recording.block_size}%`);
        chip.style.setProperty("--hue", PALETTE[recording.sequences[seq][0] % PALETTE.length]);
        list.append(chip);
      });
      if (row.table.length > MAX_CHIPS) list.append(make("li", "hint", `and ${number(row.table.length - MAX_CHIPS)} more`));
      box.append(list);
      return box;
    }

    regionOf(recording, seq, row) {
      const box = make("div", "table");
      const [, sample] = recording.sequences[seq];
      const { final } = recording.partsOf(seq, row);
      box.append(make("p", "", `Request ${this.chosen}, sample ${sample}: one region${row.ended ? ", kept until its batch ends" : ""}.`));
      const list = make("ol", "chips");
      const pieces = [
        [row.ended ? "tokens nobody reads" : "tokens", row.start, row.tokens],
        ["reserved", row.start + row.tokens, final - row.tokens],
        ["never used", row.start + final, row.length - final],
        ["rounding", row.start + row.length, row.size - row.length],
      ];
      pieces.filter(([, , slots]) => slots > 0).forEach(([word, start, slots]) => {
        const chip = make("li", "", `${word}: slots ${number(start)} to ${number(start + slots - 1)} (${number(slots)})`);
        chip.dataset.start = start;
        chip.dataset.slots = slots;
        list.append(chip);
      });
      box.append(list);
      return box;
    }
  }

  /** A frame as plain data: what the map shows, for tests and the curious. */
  function stateAt(recording, frame) {
    const state = recording.at(frame);
    const sequences = [...state.live].map(([seq, row]) => ({
      request: recording.requestOf(seq), sample: recording.sequences[seq][1], ...row,
    }));
    const blocks = {};
    const add = (id, seqs, fill) => {
      const owners = {};
      seqs.forEach((seq) => (owners[recording.requestOf(seq)] = (owners[recording.requestOf(seq)] ?? 0) + 1));
      blocks[id] = { owners, ref: seqs.length, fill };
    };
    if (recording.isPaged) for (const [id, block] of recording.blocks(state)) add(id, block.owners, block.fill);
    else for (const [seq, row] of state.live) add(row.start, [seq], row.tokens);
    return {
      t_ns: recording.times[state.index], step: recording.steps[state.index], sequences, blocks,
      idle: [...state.idle], lost: [...state.lost], copies: state.copies, shares: recording.shares(state).parts,
    };
  }

  const root = document.getElementById("block-map");
  const source = document.getElementById("kvsim-data");
  if (!root || !source) return;
  const recordings = JSON.parse(source.textContent).map((raw) => new Recording(raw));
  const player = new Player(root, recordings);
  window.kvsim = {
    engines: recordings.map((recording) => recording.engine),
    numFrames: (map = 0) => recordings[map].times.length,
    stateAt: (frame, map = 0) => stateAt(recordings[map], frame),
    lifeOf: (id, map = 0) => recordings[map].life(id),
    player,
  };
})();
