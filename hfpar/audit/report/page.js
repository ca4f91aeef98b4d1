"use strict";
(() => {
  const PAGE_SIZE = 25;
  const GRADE_ORDER = { A: 3, B: 2, C: 1 };
  const table = document.getElementById("table");
  if (!table) return;
  const data = JSON.parse(document.getElementById("data").textContent);
  const items = data.items;
  const state = { sort: "grade", up: false, page: 0, open: null, tab: {}, found: [] };
  const byId = (id) => document.getElementById(id);

  // Small helpers. Texts only ever become text nodes.
  function make(tag, attributes, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value === null || value === undefined || value === false) continue;
      if (name === "onclick") element.addEventListener("click", value);
      else element.setAttribute(name, value === true ? "" : value);
    }
    for (const child of children) if (child !== null && child !== undefined) element.append(child);
    return element;
  }
  const cutName = (cut) => `${cut.mode === "chat" ? "chat " : ""}${+(100 * cut.ratio).toFixed(4)} %`;
  const keyOf = (item) => `${item.set}/${item.item_id}`;

  for (const item of items) {
    item.hits = item.hits || [];
    item.logprobs = item.logprobs || {};
    item.longest_run = item.longest_run || 0;
    item.place = item.place || "";
    // Offsets count whole characters, a JavaScript string's don't beyond the first 65,536.
    item.isWide = /[\ud800-\udbff][\udc00-\udfff]/.test(item.text);
    item.search = null;
  }
  const longestRun = items.reduce((most, item) => Math.max(most, item.longest_run), 1);

  // Columns
  const cutNames = [];
  for (const item of items) for (const cut of item.cuts) if (!cutNames.includes(cutName(cut))) cutNames.push(cutName(cut));
  const cutOf = (item, name) => item.cuts.find((cut) => cutName(cut) === name);
  // White space and kinds of quotes make no difference.
  const isHit = (cut) => Boolean(cut.exact || cut.exact_normalized);
  const matched = (cut) => (!cut || cut.skipped ? -1 : isHit(cut) ? 2 : (cut.matched_tokens || 0) / (cut.tail_tokens || 1));
  const collator = new Intl.Collator("en", { numeric: true });
  const hasSeveralSets = new Set(items.map((item) => item.set)).size > 1;
  const columns = [
    { name: "item", label: "Item", width: cutNames.length > 4 ? null : items.some((item) => item.item_id.length > 16) ? "20%" : "14%", value: (item) => item.item_id, cell: idCell },
    hasSeveralSets && { name: "set", label: "Set", width: "13%", small: true, value: (item) => item.set, cell: (item) => item.set },
    { name: "grade", label: "Grade", width: "64px", value: (item) => (GRADE_ORDER[item.grade] || 0) * 1e6 + item.longest_run, cell: gradeCell },
    { name: "run", label: "Longest run", width: "150px", value: (item) => item.longest_run, cell: runCell },
    ...cutNames.map((name) => ({
      name: `cut ${name}`, label: name.startsWith("chat") ? name : `given ${name}`, width: "92px", small: true, value: (item) => matched(cutOf(item, name)),
      cell: (item) => cutCell(cutOf(item, name)), title: "Tokens of the tail before the first that the model would have written otherwise",
    })),
    items.some((item) => "loss" in item.logprobs) && {
      name: "loss", label: "Loss", title: "Mean negative log-likelihood of a token", width: "70px", small: true, numeric: true, value: (item) => -(item.logprobs.loss ?? -Infinity),
      cell: (item) => (item.logprobs.loss != null ? (-item.logprobs.loss).toFixed(2) : "–"),
    },
    cutNames.length < 5 && { name: "text", label: "Text", small: true, value: (item) => item.text, cell: (item) => make("span", { class: "excerpt" }, item.text.slice(0, 160)) },
  ].filter(Boolean);

  function idCell(item) {
    const isOpen = state.open === item;
    return make("button", { type: "button", class: "idbutton", "aria-expanded": String(isOpen), title: item.item_id }, item.item_id);
  }
  function gradeCell(item) {
    return item.grade ? make("span", { class: `grade g${item.grade}`, title: data.gradeWords[item.grade] }, item.grade) : make("span", { class: "quiet" }, "–");
  }
  function runCell(item) {
    const bar = make("span", { class: "runbar", "aria-hidden": "true" });
    bar.style.width = `${Math.max(1, Math.round((70 * item.longest_run) / longestRun))}px`;
    return make("span", {}, bar, String(item.longest_run));
  }
  function cutCell(cut) {
    if (!cut || cut.skipped) return make("span", { class: "quiet", title: cut ? data.skipWords[cut.skipped] : null }, "–");
    if (isHit(cut)) return make("span", { class: "exact", title: `the whole tail, ${cut.exact ? "character by character" : "but for spacing or quotes"}` }, "exact");
    return `${cut.matched_tokens || 0} / ${cut.tail_tokens || 0}`;
  }

  // Finding and sorting
  function find() {
    const set = byId("set").value;
    const grades = [...document.querySelectorAll("input[name=grade]:checked")].map((box) => box.value);
    const words = byId("find").value.toLowerCase().split(/\s+/).filter(Boolean);
    const column = columns.find((item) => item.name === state.sort) || columns[0];
    const found = items.filter((item) => {
      if (set && item.set !== set) return false;
      if (grades.length && !grades.includes(item.grade || "none")) return false;
      if (!words.length) return true;
      item.search = item.search || `${item.item_id} ${item.place} ${item.text}`.toLowerCase();
      return words.every((word) => item.search.includes(word));
    });
    const rows = found.map((item, number) => ({ item, number, value: column.value(item) }));
    rows.sort((a, b) => {
      const order = typeof a.value === "number" ? a.value - b.value : collator.compare(a.value, b.value);
      return (state.up ? order : -order) || a.number - b.number;
    });
    state.found = rows.map((row) => row.item);
  }

  // Drawing
  function draw() {
    const pages = Math.max(1, Math.ceil(state.found.length / PAGE_SIZE));
    state.page = Math.min(Math.max(state.page, 0), pages - 1);
    const shown = state.found.slice(state.page * PAGE_SIZE, (state.page + 1) * PAGE_SIZE);
    const head = make("tr", {}, ...columns.map((column) => make(
      "th",
      { scope: "col", class: [column.small && "hide-small", column.numeric && "numeric"].filter(Boolean).join(" ") || null,
        "aria-sort": column.name === state.sort ? (state.up ? "ascending" : "descending") : null },
      make("button", { type: "button", title: column.title, onclick: () => sortBy(column.name) }, column.label),
    )));
    const body = make("tbody", {});
    for (const item of shown) {
      body.append(row(item));
      if (item === state.open) body.append(detailRow(item));
    }
    const cols = make("colgroup", {}, ...columns.map((column) => {
      const col = make("col", { class: column.small ? "hide-small" : null });
      if (column.width) col.style.width = column.width;
      return col;
    }));
    table.replaceChildren(shown.length ? make("table", { class: "items" }, cols, make("thead", {}, head), body) : make("p", { class: "nothing" }, "No item is like that."));
    const total = state.found.length;
    byId("count").textContent = total === items.length ? `${total.toLocaleString("en")} items` : `${total.toLocaleString("en")} of ${items.length.toLocaleString("en")} items`;
    byId("pager").hidden = pages === 1;
    byId("page").textContent = `Page ${state.page + 1} of ${pages}`;
    byId("previous").disabled = state.page === 0;
    byId("next").disabled = state.page === pages - 1;
  }
  function row(item) {
    const element = make("tr", { class: item === state.open ? "item open" : "item" }, ...columns.map((column) => make(
      "td", { class: [column.small && "hide-small", column.numeric && "numeric"].filter(Boolean).join(" ") || null }, column.cell(item),
    )));
    element.addEventListener("click", () => {
      if (String(getSelection())) return;
      state.open = state.open === item ? null : item;
      remember();
      redraw(item);
    });
    return element;
  }
  function redraw(item) {
    draw();
    const index = state.found.slice(state.page * PAGE_SIZE).indexOf(item);
    const button = table.querySelectorAll(".idbutton")[index];
    if (button) button.focus({ preventScroll: true });
  }
  function sortBy(name) {
    state.up = state.sort === name ? !state.up : name === "item" || name === "set" || name === "text" || name === "loss";
    state.sort = name;
    state.page = 0;
    find();
    draw();
    const button = table.querySelector("th[aria-sort] button");
    if (button) button.focus({ preventScroll: true });
  }

  // An item
  function detailRow(item) {
    const usable = item.cuts.filter((cut) => !cut.skipped);
    const chosen = usable.find((cut) => cutName(cut) === state.tab[keyOf(item)]) || usable.find(isHit) || usable[0];
    const tabs = make("div", { class: "tabs" }, "Given", ...item.cuts.map((cut) => make(
      "button",
      { type: "button", "aria-pressed": String(cut === chosen), disabled: Boolean(cut.skipped), title: cut.skipped ? data.skipWords[cut.skipped] : null,
        onclick: () => { state.tab[keyOf(item)] = cutName(cut); draw(); } },
      cutName(cut) + (cut.skipped ? " (skipped)" : ""),
    )), make("a", { href: `#item=${encodeURIComponent(keyOf(item))}` }, item.place || "link"));
    const paper = make("div", { class: "paper" }, item.cuts.length ? tabs : null, colouredText(item, chosen));
    if (chosen) paper.append(...written(item, chosen));
    paper.append(itemFacts(item, chosen));
    const small = matchMedia("(max-width: 640px)").matches;
    const span = small ? columns.filter((column) => !column.small).length : columns.length;
    return make("tr", { class: "detail" }, make("td", { colspan: span }, paper));
  }
  const characters = (item) => (item.isWide ? Array.from(item.text) : item.text);
  const joined = (part) => (typeof part === "string" ? part : part.join(""));

  function colouredText(item, cut) {
    const text = characters(item);
    const cutAt = cut ? cut.cut || 0 : text.length;
    const run = item.longest_run_span || [0, 0];
    // A server that hides log-probabilities leaves only what was written.
    const isBlind = !item.hits.length && !Object.keys(item.logprobs).length;
    const hits = isBlind && cut ? [[cutAt, cutAt + followed(joined(text.slice(cutAt)), cut)]] : item.hits;
    const places = new Set([0, cutAt, text.length, run[0], run[1]]);
    for (const [start, end] of hits) if (end > cutAt) { places.add(Math.max(start, cutAt)); places.add(end); }
    const edges = [...places].filter((place) => place >= 0 && place <= text.length).sort((a, b) => a - b);
    const paragraph = make("p", { class: "text" });
    let hit = 0;
    for (let n = 0; n < edges.length; n += 1) {
      const [start, end] = [edges[n], edges[n + 1]];
      if (start === cutAt && cut) paragraph.append(make("span", { class: "cutmark", title: `cut at ${cutName(cut)}` }));
      if (end === undefined) break;
      while (hit < hits.length && hits[hit][1] <= start) hit += 1;
      const isChosen = hit < hits.length && hits[hit][0] <= start;
      const isLongest = start >= run[0] && end <= run[1];
      const tag = start < cutAt || (isBlind && !isChosen) ? "span" : isChosen ? "ins" : "del";
      const kind = [start < cutAt && "given", isLongest && "longest"].filter(Boolean).join(" ");
      paragraph.append(make(tag, { class: kind || null }, joined(text.slice(start, end))));
    }
    return paragraph;
  }
  function sharedLength(tail, cut) {
    if (cut.exact && cut.written === undefined) return tail.length;
    const other = cut.written || "";
    let same = 0;
    while (same < tail.length && same < other.length && tail[same] === other[same]) same += 1;
    return same;
  }
  const followed = (tail, cut) => Array.from(tail.slice(0, isHit(cut) ? tail.length : sharedLength(tail, cut))).length;
  function written(item, cut) {
    const label = (text) => make("p", { class: "label" }, text);
    const tail = joined(characters(item).slice(cut.cut || 0));
    if (cut.exact && cut.written === undefined) return [label("What the model wrote"), make("p", { class: "text wrote" }, make("ins", {}, "the rest, word for word"))];
    if (cut.written === undefined) return [];
    if (!cut.written) return [label("What the model wrote"), make("p", { class: "text wrote quiet" }, "nothing: it ended the text here")];
    const same = sharedLength(tail, cut);
    const differs = same < tail.length;
    const rest = cut.written.slice(same);
    return [
      label(cut.is_complete ? "What the model wrote" : "What the model wrote, as far as it was followed"),
      make("p", { class: "text wrote" }, same ? make("ins", {}, cut.written.slice(0, same)) : null,
        rest ? differs && isHit(cut) ? make("ins", {}, rest) : make("span", { class: differs ? "other" : "quiet" }, rest) : null, cut.is_complete ? null : make("span", { class: "quiet" }, " …")),
    ];
  }
  function itemFacts(item, cut) {
    const facts = [["Tokens", item.num_tokens]];
    if (item.longest_run) facts.push(["Longest run", `${item.longest_run} tokens`]);
    if (item.grade) facts.push([`Grade ${item.grade}`, data.gradeWords[item.grade]]);
    if (cut) {
      facts.push(["Tail matched", `${cut.matched_tokens || 0} of ${cut.tail_tokens || 0} tokens`], ["Tail", `${cut.tail_words || 0} words`]);
      if (!cut.exact && cut.exact_normalized) facts.push(["Exact", "but for spacing or quotes"]);
      if (cut.near_tie) facts.push(["Near tie", cut.settled_by === "generation" ? "settled by generation" : "yes"]);
      if (cut.rouge_l != null) facts.push(["ROUGE-L", cut.rouge_l.toFixed(2)]);
      if (cut.edit_similarity != null) facts.push(["Edit similarity", cut.edit_similarity.toFixed(2)]);
      if (cut.answer != null || cut.answer_right != null) facts.push(["Answer from the prefix", `${cut.answer ?? "none"}${cut.answer_right == null ? "" : cut.answer_right ? ", right" : ", wrong"}`]);
      if (cut.mode === "chat") facts.push(["Colours", "of the bare text; below, of this prompt"]);
    }
    if (item.own_answer != null || item.own_answer_right != null) facts.push(["Answer to the whole question", `${item.own_answer ?? "none"}${item.own_answer_right == null ? "" : item.own_answer_right ? ", right" : ", wrong"}`]);
    if (item.pair_id != null) facts.push(["Made from", item.pair_id]);
    for (const [name, label] of [["min_k", "Min-K"], ["min_k_plus_plus", "Min-K++"], ["zlib", "loss / zlib"], ["reference", "against reference"]]) {
      if (name in item.logprobs && item.logprobs[name] !== null) facts.push([label, item.logprobs[name].toPrecision(3)]);
    }
    return make("dl", { class: "itemfacts" }, ...facts.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, String(value)))));
  }

  // Addresses of items, and the maps
  function remember() {
    const hash = state.open ? `#item=${encodeURIComponent(keyOf(state.open))}` : location.pathname + location.search;
    try { history.replaceState(null, "", hash); } catch { /* a page without an address of its own */ }
  }
  function show(item, scroll) {
    byId("filters").reset();
    state.open = item;
    find();
    state.page = Math.floor(state.found.indexOf(item) / PAGE_SIZE);
    draw();
    const opened = table.querySelector("tr.open");
    if (opened && scroll) opened.scrollIntoView({ block: "start", behavior: "instant" });
  }
  function followAddress() {
    const match = /^#item=(.*)$/.exec(location.hash);
    if (!match) return false;
    let wanted;
    try { wanted = decodeURIComponent(match[1]); } catch { return false; }
    const item = items.find((candidate) => keyOf(candidate) === wanted);
    if (item) show(item, true);
    return Boolean(item);
  }
  function itemAt(map, event) {
    const box = map.getBoundingClientRect();
    const size = map.viewBox.baseVal.width / box.width / 10;
    const column = Math.floor((event.clientX - box.left) * size);
    const line = Math.floor((event.clientY - box.top) * size);
    const mine = items.filter((item) => item.set === map.dataset.set);
    return mine[line * Number(map.dataset.columns) + column];
  }
  for (const map of document.querySelectorAll(".map")) {
    map.addEventListener("click", (event) => { const item = itemAt(map, event); if (item) { show(item, true); remember(); } });
    map.addEventListener("mousemove", (event) => {
      const item = itemAt(map, event);
      let title = map.querySelector("title");
      if (!title) { title = document.createElementNS("http://www.w3.org/2000/svg", "title"); map.prepend(title); }
      title.textContent = item ? `${item.item_id}${item.grade ? `, grade ${item.grade}` : ""}, longest run ${item.longest_run} tokens` : "";
    });
  }

  const again = () => { state.page = 0; find(); draw(); };
  byId("filters").hidden = false;
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  // Not of the text field: its change event comes between the two halves of a click on a row.
  byId("filters").addEventListener("change", (event) => { if (event.target !== byId("find")) again(); });
  byId("find").addEventListener("input", again);
  const turn = (step) => { state.page += step; draw(); byId("items").scrollIntoView({ behavior: "instant" }); };
  byId("previous").addEventListener("click", () => turn(-1));
  byId("next").addEventListener("click", () => turn(1));
  addEventListener("hashchange", followAddress);
  matchMedia("(max-width: 640px)").addEventListener("change", draw);
  find();
  if (!followAddress()) {
    state.open = state.found[0] || null;
    draw();
  }
})();
