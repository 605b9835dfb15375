'use strict';
// The page. Messages of the stream are stored in runs; what they change is drawn at most once per
// frame. Text of runs is always set as text and never as HTML.
(() => {
  const $ = id => document.getElementById(id);
  const runs = new Map();
  let shown = null; // ID of the run whose figures, seeds and samples are shown
  let cards = []; // the GPUs
  let order = {column: null, descending: false}; // of the table of runs
  let dirty = new Set(), scheduled = false;
  const lattice = {fetched: -1, busy: false, names: ''}, past = {fetched: -1, at: 0};
  const number = Charts.number, clock = s => s === null || s === undefined ? '–' : Charts.clock(s);

  function get(id) {
    if (!runs.has(id)) {
      runs.set(id, {id, index: runs.size, name: id, status: {}, series: {}, groups: [], samples: [], version: 0, hidden: false});
    }
    return runs.get(id);
  }

  // mark schedules parts of the page to be drawn with the next frame.
  function mark(...parts) {
    for (const p of parts) dirty.add(p);
    if (scheduled) return;
    scheduled = true;
    requestAnimationFrame(() => { scheduled = false; const d = dirty; dirty = new Set(); draw(d); });
  }

  function draw(d) {
    const run = shown && runs.get(shown);
    if (!run) return;
    if (d.has('runs')) { drawRuns(); drawSettings(); }
    if (d.has('status')) drawStatus(run);
    if (d.has('curves')) Charts.draw([...runs.values()].filter(r => !r.hidden), run.hidden ? [] : markersOf(run));
    if (d.has('events')) drawEvents(run);
    if (d.has('samples')) drawSample(run);
    if (d.has('lattice')) fetchLattice(run);
    performance.mark('drawn');
  }

  function element(tag, text, className) {
    const e = document.createElement(tag);
    if (text !== undefined && text !== '') e.textContent = text;
    if (className) e.className = className;
    return e;
  }

  // rate formats a large number with a letter for its magnitude.
  function rate(v) {
    if (v === null || v === undefined) return '–';
    for (const [size, letter] of [[1e12, 'T'], [1e9, 'G'], [1e6, 'M'], [1e3, 'k']]) {
      if (v >= size) return (v / size).toFixed(v >= 100 * size ? 0 : letter === 'k' ? 1 : 2) + ' ' + letter;
    }
    return v.toFixed(0);
  }
  function percent(v) { return Math.round(100 * v) + '%'; }
  function thousands(n) { return String(n).replace(/\B(?=(\d{3})+(?!\d))/g, ','); }
  function gib(bytes) { return (bytes / 2 ** 30).toFixed(1); }

  // gauges returns the tiles of a GPU, without values that it does not report.
  function gauges(c) {
    const name = 'GPU ' + c.index, tiles = [];
    if (c.power_w) tiles.push([name + ' power', number(Math.round(c.power_w)) + ' W', c.power_limit_w ? 'of ' + number(Math.round(c.power_limit_w)) + ' W' : '']);
    if (c.memory_total_bytes) tiles.push([name + ' memory', gib(c.memory_used_bytes) + ' GiB', 'of ' + gib(c.memory_total_bytes) + ' GiB']);
    if (c.busy) tiles.push([name + ' busy', percent(c.busy), '']);
    return tiles;
  }

  // pairs fills a list of terms with names and texts, and optionally a second line. Elements are
  // reused, so that a selection survives an update.
  function pairs(list, entries) {
    while (list.children.length > entries.length) list.lastChild.remove();
    entries.forEach((texts, i) => {
      let div = list.children[i];
      if (!div) {
        div = element('div');
        div.append(element('dt'), element('dd'), element('dd', '', 'more'));
        list.append(div);
      }
      [0, 1, 2].forEach(k => {
        const text = texts[k] || '', part = div.children[k];
        if (part.textContent !== text) part.textContent = text;
        part.hidden = k === 2 && !text;
      });
    });
  }

  const words = {waiting: 'waiting', running: 'running', ended: 'ended', stopped: 'stopped', failed: 'failed', silent: 'silent'};
  const explanations = {waiting: 'It has not made its first step.',
    silent: 'The log has not changed for minutes: the program is busy, or it was killed.'};

  function isOver(run) { return ['ended', 'stopped', 'failed'].includes(run.status.state); }

  function drawStatus(run) {
    const s = run.status, over = isOver(run);
    $('name').textContent = run.name === 'run' ? 'Kasmina' : run.name;
    say(words[s.state] || s.state || '', s.state || '');
    const error = s.error || explanations[s.state] || '';
    $('error').hidden = !error;
    $('error').textContent = error;
    drawProgress(run);
    document.title = (s.share && !over ? Math.floor(100 * s.share) + '% · ' : '') + (run.name === 'run' ? '' : run.name + ' · ') + 'Kasmina';

    const tiles = [['training loss', number(s.loss), 'nats per token'],
      ['held-out loss', number(s.val_loss), s.best_val_step && s.best_val_loss !== s.val_loss ? 'best ' + number(s.best_val_loss) + ' at step ' + thousands(s.best_val_step) : 'nats per token'],
      ['bits per byte', number(s.val_bpb), 'held-out'],
      over ? ['tokens per second', rate(s.mean_tokens_per_s), 'average'] : ['tokens per second', rate(s.tokens_per_s), 'average ' + rate(s.mean_tokens_per_s)]];
    if (s.ceiling_share) tiles.push(['share of the peak', percent(s.ceiling_share), 'of ' + rate(s.ceiling_flops_per_s) + 'FLOP/s']);
    const frozen = s.all_params > s.params;
    tiles.push([frozen ? 'trainable parameters' : 'parameters', rate(s.params), frozen ? 'of ' + rate(s.all_params) : s.params_step ? 'since step ' + thousands(s.params_step) : s.seeds ? thousands(s.seeds) + ' seeds' : '']);
    if (s.learning_rate !== null || s.grad_norm !== null) {
      tiles.push(['learning rate', number(s.learning_rate && +s.learning_rate.toPrecision(3)), ''], ['gradient norm', number(s.grad_norm), '']);
    }
    for (const c of cards) tiles.push(...gauges(c));
    if (s.dropped) tiles.push(['lost events', String(s.dropped), 'the board was too busy']);
    pairs($('tiles'), tiles);
    arrangeTiles();
    drawStages(s.stages || {});
    Steer.update(run);
  }

  // arrangeTiles chooses the number of columns so that the last row has as few gaps as possible.
  function arrangeTiles() {
    const list = $('tiles'), n = list.children.length, most = Math.max(2, Math.min(n, Math.floor(list.clientWidth / 136)));
    const rows = Math.ceil(n / most);
    list.style.setProperty('--columns', Math.ceil(n / rows));
    // Tiles of an incomplete row grow to fill it.
    const columns = Math.ceil(n / rows), missing = columns * rows - n;
    [...list.children].forEach((tile, i) => { tile.style.gridColumn = i >= n - missing && rows > 1 ? 'span 1' : ''; });
    if (missing && rows > 1) list.children[n - 1].style.gridColumn = 'span ' + (missing + 1);
  }

  function drawProgress(run) {
    const s = run.status, share = Math.max(0, Math.min(1, s.share || 0)), done = Math.floor(100 * share);
    const parts = ['step ' + thousands(s.step || 0) + (s.steps ? ' of ' + thousands(s.steps) : '')];
    if (s.budget) parts.push('budget ' + s.budget);
    if (s.share) parts.push(done + '%');
    if (s.elapsed_s) parts.push(clock(s.elapsed_s) + ' elapsed');
    if (s.state === 'running' && s.left_s !== null) parts.push(clock(s.left_s) + ' left');
    if (s.saved) parts.push('saved at step ' + thousands(s.saved_step));
    $('pace').textContent = parts.join(' · ');
    $('progress').hidden = !s.share && !s.steps;
    $('progress').setAttribute('aria-valuenow', done);
    $('done').style.width = 100 * share + '%';
    const notches = s.steps ? run.groups.filter(g => g.kind === 'Grown') : [];
    while ($('progress').children.length > 1 + notches.length) $('progress').lastChild.remove();
    notches.forEach((g, i) => {
      const notch = $('progress').children[1 + i] || $('progress').appendChild(element('i'));
      notch.style.left = 100 * g.step / s.steps + '%';
      notch.title = 'step ' + g.step + ': ' + g.to;
    });
  }

  function drawStages(counts) {
    const names = Lattice.stages.filter(n => counts[n]), total = names.reduce((n, name) => n + counts[name], 0);
    $('lattice-section').hidden = !names.length;
    const list = $('legend'), bar = $('stages');
    while (list.children.length > names.length) { list.lastChild.remove(); bar.lastChild.remove(); }
    names.forEach((name, i) => {
      let item = list.children[i];
      if (!item) {
        item = element('li');
        item.append(element('span', '', 'key'), element('span'));
        list.append(item);
        bar.append(element('span'));
      }
      item.firstChild.style.background = bar.children[i].style.background = Lattice.color(name);
      bar.children[i].style.width = 100 * counts[name] / total + '%';
      item.lastChild.textContent = name + ' ' + counts[name];
    });
  }

  // columns are those of the table of runs. best is -1 if the lowest value is the best one.
  const runColumns = [
    {name: 'run', value: r => r.name},
    {name: 'state', value: r => words[r.status.state] || ''},
    {name: 'done', value: r => r.status.share || 0, numeric: true},
    {name: 'steps', value: r => r.status.step, text: r => thousands(r.status.step || 0), numeric: true},
    {name: 'training loss', value: r => r.status.loss, best: -1, numeric: true},
    {name: 'held-out loss', value: r => r.status.val_loss, best: -1, numeric: true},
    {name: 'best held-out', value: r => r.status.best_val_loss, best: -1, numeric: true},
    {name: 'bits per byte', value: r => r.status.val_bpb, best: -1, numeric: true},
    {name: 'tokens/s', value: r => r.status.mean_tokens_per_s, text: r => rate(r.status.mean_tokens_per_s), best: 1, numeric: true},
    {name: 'parameters', value: r => r.status.params, text: r => rate(r.status.params), numeric: true},
    {name: 'time', value: r => r.status.elapsed_s, text: r => clock(r.status.elapsed_s), numeric: true},
  ];

  // drawRuns fills the table with the figures of all runs. The best value of a column is bold.
  function drawRuns() {
    const all = [...runs.values()];
    $('runs-section').hidden = all.length < 2;
    if (all.length < 2) return;
    const key = document.activeElement && document.activeElement.dataset.key;
    const head = element('tr'), rows = sortedRuns(all).map(run => runRow(run, all));
    head.append(element('td', '', 'box'), ...runColumns.map((column, i) => {
      const th = element('th', '', column.numeric ? 'number' : ''), button = element('button', column.name);
      button.type = 'button';
      button.dataset.key = 'sort' + i;
      if (order.column === i) th.setAttribute('aria-sort', order.descending ? 'descending' : 'ascending');
      button.addEventListener('click', () => {
        order = {column: i, descending: order.column === i && !order.descending};
        mark('runs');
      });
      th.append(button);
      return th;
    }));
    $('runs').replaceChildren(head, ...rows);
    const focused = key && [...$('runs').querySelectorAll('[data-key]')].find(e => e.dataset.key === key);
    if (focused) focused.focus();
  }

  function sortedRuns(all) {
    if (order.column === null) return all;
    const value = runColumns[order.column].value, sign = order.descending ? -1 : 1;
    const missing = v => v === null || v === undefined;
    return [...all].sort((a, b) => {
      const x = value(a), y = value(b);
      if (missing(x) || missing(y)) return missing(x) - missing(y);
      return sign * (x < y ? -1 : x > y ? 1 : 0);
    });
  }

  function runRow(run, all) {
    const row = element('tr', '', run.id === shown ? 'shown' : ''), box = element('input'), cell = element('td', '', 'box');
    box.type = 'checkbox';
    box.checked = !run.hidden;
    box.dataset.key = 'box' + run.id;
    box.setAttribute('aria-label', 'show the curves of ' + run.name);
    box.addEventListener('change', () => { run.hidden = !box.checked; mark('curves'); });
    const key = element('span', '', 'key');
    key.style.background = Charts.color(run.index);
    cell.append(box, ' ', key);
    row.append(cell);
    runColumns.forEach((column, i) => {
      const td = element('td', '', column.numeric ? 'number' : '');
      const value = column.value(run);
      if (i === 0) {
        const show = element('button', run.name, 'link');
        show.type = 'button';
        show.dataset.key = 'show' + run.id;
        show.setAttribute('aria-pressed', String(run.id === shown));
        show.addEventListener('click', () => choose(run.id));
        td.className = 'name';
        td.append(show);
      } else if (column.name === 'done') {
        td.textContent = Math.floor(100 * value) + '%'; // as in the header
      } else {
        td.textContent = column.text ? column.text(run) : column.numeric ? number(value) : value;
      }
      if (column.best && isBest(column, value, all)) td.classList.add('best');
      row.append(td);
    });
    return row;
  }

  function isBest(column, value, all) {
    const values = all.map(column.value).filter(v => v !== null && v !== undefined);
    return values.length > 1 && value === (column.best < 0 ? Math.min(...values) : Math.max(...values));
  }

  function drawSettings() {
    const all = [...runs.values()];
    const names = [...new Set(all.flatMap(r => Object.keys(r.status.settings || {})))].sort()
      .filter(n => all.length === 1 || new Set(all.map(r => (r.status.settings || {})[n])).size > 1);
    $('settings-box').firstElementChild.textContent = all.length === 1 ? 'Settings' : 'Settings that differ';
    $('settings-section').hidden = !names.length;
    const row = (tag, cells) => {
      const tr = element('tr');
      cells.forEach((text, i) => tr.append(element(i ? tag : 'th', text === undefined ? '–' : text)));
      return tr;
    };
    $('settings').replaceChildren(row('th', ['setting', ...all.map(r => r.name)]),
      ...names.map(n => row('td', [n, ...all.map(r => (r.status.settings || {})[n])])));
  }

  function choose(id) {
    shown = id;
    lattice.fetched = past.fetched = -1;
    Lattice.select(null);
    $('seed').hidden = true;
    $('history-section').hidden = true;
    mark('runs', 'status', 'curves', 'events', 'samples', 'lattice');
  }

  const figureMeanings = {
    'slot': 'The row of the layer\'s weights that the blueprint uses.',
    'α': 'The weight with which the blueprint is blended into the model, from 0 to 1.',
    'lowers the loss by': 'How much lower the held-out loss is with the seed than without it. If it is negative, the model is better without the seed.',
    'share of the loss': 'The same, divided by the loss without the seed.',
    'stability': 'The fraction of the held-out batches that agree with the result of the comparison.',
    'dead features': 'The fraction of the activations at the seed that are almost 0.',
    'drift': 'The relative change of the mean and the variance of these activations in the last epoch.',
  };

  function stageName(name) {
    const span = element('span', name, 'stage');
    span.style.setProperty('--stage', Lattice.color(name));
    return span;
  }

  // story returns what an event says, as text and elements.
  function story(e) {
    switch (e.kind) {
      case 'StageChanged': return [stageName(e.from), ' → ', stageName(e.to)];
      case 'GateOpened': return ['the gate from ' + e.from + ' to ' + e.to + ' has opened'];
      case 'RampFinished': return ['blending has finished at α = ' + number(e.value)];
      case 'EmbargoOver': return ['may be recycled'];
      case 'Noted': return [e.to];
      case 'Grown': return [element('span', 'The model has changed: ' + e.to, 'grown')];
      case 'Refused': return ['a command was rejected: ' + e.to];
      case 'NonFinite': return [number(e.value) + ' NaN or Inf values'];
    }
    return [e.kind];
  }

  // place names a seed.
  function place(e) {
    const layer = Lattice.layers()[e.layer];
    return e.place || (layer ? layer.name : 'layer ' + e.layer) + ', seed ' + e.seed;
  }

  // eventItem shows a group of events. With links, it names the seeds.
  function eventItem(g, links) {
    const item = element('li');
    item.append(element('span', (g.step ? 'step ' + thousands(g.step) + ', ' : '') + 'epoch ' + g.epoch, 'when'));
    if (links && g.seeds && g.seeds.length) {
      if (g.count > 1) item.append(thousands(g.count) + ' seeds (');
      const named = g.seeds.slice(0, g.count > 4 ? 3 : 4);
      named.forEach((one, i) => {
        const b = element('button', place(one), 'link');
        b.type = 'button';
        b.addEventListener('click', () => visit({layer: one.layer, seed: one.seed}));
        item.append(i ? '; ' : '', b);
      });
      if (g.count > named.length) item.append(' and ' + thousands(g.count - named.length) + ' more');
      item.append(g.count > 1 ? '): ' : ': ');
    }
    item.append(...story(g));
    if (g.reason) item.append(element('span', ' because ' + g.reason, 'why'));
    return item;
  }

  // visit shows a seed that another part of the page names.
  function visit(at) {
    const layer = Lattice.layers()[at.layer];
    if (!layer || at.seed >= layer.stage.length) return;
    Lattice.select(at);
    $('lattice-section').scrollIntoView();
    $('lattice').focus({preventScroll: true});
  }

  const listed = 100; // events in the list

  function drawEvents(run) {
    $('events-section').hidden = !run.groups.length;
    $('events').replaceChildren(...run.groups.slice(-listed).reverse().map(g => eventItem(g, true)));
  }

  // markersOf returns the markers of the charts.
  function markersOf(run) {
    return run.groups.filter(g => g.kind === 'Grown' || g.kind === 'StageChanged').slice(-1000).map(g => ({
      step: g.step, time: g.time, grown: g.kind === 'Grown', color: Lattice.color(g.to),
      text: g.kind === 'Grown' ? g.to : thousands(g.count) + (g.count === 1 ? ' seed ' : ' seeds ') + g.from + ' → ' + g.to,
    }));
  }

  function drawSample(run) {
    const s = run.samples[run.samples.length - 1];
    $('samples-section').hidden = !s;
    if (!s) return;
    $('sample-step').textContent = 'after step ' + thousands(s.step);
    $('sample').textContent = s.text;
  }

  // fetchLattice gets the picture of the seeds, at most twice a second.
  async function fetchLattice(run) {
    if (run.lattice) { showLattice(run.lattice); showHistory(run.history); return; }
    if (lattice.busy || run.version === lattice.fetched || !run.version) return;
    lattice.busy = true;
    if (lattice.fetched < 0) Steer.learn();
    lattice.fetched = run.version;
    try {
      const answer = await fetch('api/v1/runs/' + run.id + '/lattice');
      if (answer.ok && run.id === shown) showLattice(await answer.json());
    } catch { lattice.fetched = -1; } // the stream reports when the board is back
    fetchHistory(run);
    setTimeout(() => { lattice.busy = false; mark('lattice'); }, 500);
  }

  const historyEvery = 5000; // milliseconds

  // fetchHistory gets the stages of the seeds over the epochs.
  async function fetchHistory(run) {
    const wait = past.at + historyEvery - performance.now();
    if (past.fetched >= 0 && wait > 0) {
      clearTimeout(past.timer);
      past.timer = setTimeout(() => { if (run.id === shown) fetchHistory(run); }, wait);
      return;
    }
    past.fetched = run.version;
    past.at = performance.now();
    try {
      const answer = await fetch('api/v1/runs/' + run.id + '/history');
      if (answer.ok && run.id === shown) showHistory(await answer.json());
    } catch { past.fetched = -1; }
  }

  function showHistory(history) {
    $('history-section').hidden = !history || !history.epochs || !history.rows.some(r => r && r.length);
    if (!$('history-section').hidden) Lattice.history($('history'), history);
  }

  function showLattice(picture) {
    $('lattice-section').hidden = !picture.layers.length;
    if (!picture.layers.length) return;
    Lattice.set(picture);
    const names = shown + Lattice.layers().map(l => '\n' + l.name).join('');
    if (names !== lattice.names) { lattice.names = names; mark('events'); } // events name the layers
    const at = Lattice.chosen();
    if (at) showSeed(at);
  }

  let asked = 0;
  async function showSeed(at) {
    const turn = ++asked, run = runs.get(shown), layer = Lattice.layers()[at.layer];
    let seed;
    if (run.seeds) {
      seed = run.seeds.get(at.layer + '/' + at.seed) || {stage: Lattice.stages[layer.stage[at.seed]], events: []};
    } else {
      try {
        const answer = await fetch('api/v1/runs/' + run.id + '/seeds/' + at.layer + '/' + at.seed);
        if (!answer.ok) return;
        seed = await answer.json();
      } catch { return; }
    }
    if (turn !== asked) return;
    $('seed').hidden = false;
    $('seed-title').textContent = place({...at, place: seed.place}) + ': ' + seed.stage;
    const events = [...(seed.events || [])].reverse(), last = events.find(e => e.kind === 'StageChanged');
    $('seed-story').textContent = (Lattice.meanings[seed.stage] || '') + ' ' + (last ? 'It went from ' + last.from + ' to ' + last.to +
      (last.step ? ' after step ' + last.step : '') + ', epoch ' + last.epoch + (last.reason ? ', because ' + last.reason : '') + '.' :
      'Nothing has happened to it yet.');
    $('seed-trial').textContent = trial(seed);
    $('seed-waits').hidden = !seed.waits_for || isOver(run);
    $('seed-waits').textContent = seed.waits_for ? 'The next stage requires ' + seed.waits_for + '.' : '';
    pairs($('seed-figures'), seedFigures(seed));
    $('seed-events').replaceChildren(...events.map(e => eventItem(e, false)));
    if (!run.seeds) Steer.seed(run, at, seed, layer);
  }

  const tried = ['Evaluating', 'FineTuning', 'Fossilized', 'Culled', 'RolledBack'];

  // trial says what came of comparing the model with and without a seed.
  function trial(seed) {
    if (seed.compared) {
      const better = seed.delta >= 0;
      return 'With the seed, the held-out loss is ' + number(Math.abs(seed.delta)) + (better ? ' lower' : ' higher') + ' than without it (' +
        number(+(100 * Math.abs(seed.improvement)).toPrecision(3)) + '%), and ' + percent(seed.stability) + ' of the batches agree.';
    }
    return tried.includes(seed.stage) ? 'Nothing was compared: the model has not been evaluated with and without this seed.' : '';
  }

  function seedFigures(seed) {
    const figures = [];
    if (seed.kind) {
      figures.push(['blueprint', seed.kind]);
      if (seed.slot) figures.push(['slot', String(seed.slot)]);
      figures.push(['epochs in stage', String(seed.epochs_in_stage)]);
    }
    figures.push(['α', number(seed.alpha || 0)]);
    if (seed.compared) {
      figures.push(['lowers the loss by', number(seed.delta)], ['share of the loss', number(seed.improvement)], ['stability', number(seed.stability)]);
    }
    for (const [name, key] of [['variance', 'variance'], ['mean', 'mean'], ['dead features', 'dead_ratio'], ['drift', 'drift'], ['gradient norm', 'grad_norm']]) {
      if (seed[key]) figures.push([name, number(seed[key])]);
    }
    if (seed.non_finite) figures.push(['NaN and Inf', String(seed.non_finite)]);
    if (seed.kind) figures.push(['may advance', seed.can_advance ? 'yes' : 'no']);
    return figures;
  }

  function say(text, state) {
    const p = $('state');
    if (p.textContent !== text) p.textContent = text;
    p.className = state;
  }

  function save(name, blob) {
    const a = element('a');
    a.href = URL.createObjectURL(blob);
    a.download = name;
    a.click();
    setTimeout(() => URL.revokeObjectURL(a.href), 1000);
  }

  // csvText returns text as a cell of CSV. A leading quote keeps spreadsheets from taking the text
  // for a formula. Numbers stay as they are.
  function csvText(text) {
    text = String(text);
    if (/^[\s\0]*[=+\-@\uff1d\uff0b\uff0d\uff20]|^[\t\r\n]/.test(text) && !/^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i.test(text)) {
      text = "'" + text;
    }
    return '"' + text.replaceAll('"', '""') + '"';
  }

  // csvNumber returns a figure as a cell of CSV.
  function csvNumber(v) { return typeof v === 'number' ? v : ''; }

  function csv() {
    const lines = ['run,step,seconds,loss,learning_rate,grad_norm,tokens_per_s,val_loss,val_bpb'];
    const row = (run, ...figures) => lines.push([csvText(run.name), ...figures.map(csvNumber)].join(','));
    for (const run of runs.values()) {
      if (run.hidden) continue;
      const s = run.series;
      (s.step || []).forEach((step, i) => row(run, step, s.time[i], s.loss[i], s.learning_rate[i], s.grad_norm[i], s.tokens_per_s[i], null, null));
      (s.eval_step || []).forEach((step, i) => row(run, step, s.eval_time[i], null, null, null, null, s.val_loss[i], s.val_bpb[i]));
    }
    return lines.join('\n') + '\n';
  }

  const seriesColumns = ['step', 'time', 'loss', 'learning_rate', 'grad_norm', 'tokens_per_s', 'eval_step', 'eval_time', 'val_loss', 'val_bpb'];
  let board = null; // ID of the board that the stream comes from
  const hear = {
    // Another board, with other runs, may listen at the same address now.
    board(b) {
      if (board !== null && board !== b.id) location.reload();
      board = b.id;
    },
    // The run was resumed or replaced: everything about it follows.
    again(m) {
      const run = get(m.run);
      run.series = {};
      run.groups = [];
      run.samples = [];
      if (run.id === shown) choose(run.id); else mark('curves');
    },
    cards(all) { cards = all; mark('status'); },
    run(s) {
      const fresh = !runs.has(s.id), run = get(s.id);
      run.status = s;
      run.name = s.name;
      if (shown === null) choose(s.id);
      mark('status', 'runs', ...(fresh ? ['curves'] : []));
    },
    series(m) {
      const run = get(m.run);
      for (const c of seriesColumns) run.series[c] = m.all ? m[c] || [] : (run.series[c] || []).concat(m[c] || []);
      mark('curves');
    },
    lattice(m) { get(m.run).version = m.version; mark('lattice'); },
    // A group that has grown replaces the one with the same number.
    groups(m) {
      const run = get(m.run);
      for (const g of m.groups) {
        let i = run.groups.length;
        while (i > 0 && run.groups[i - 1].number > g.number) i--;
        if (i > 0 && run.groups[i - 1].number === g.number) run.groups[i - 1] = g; else run.groups.splice(i, 0, g);
      }
      if (run.groups.length > 4000) run.groups = run.groups.slice(-2000);
      mark('events', 'curves', 'status');
    },
    samples(m) {
      const run = get(m.run);
      run.samples = run.samples.concat(m.samples).slice(-20);
      mark('samples');
    },
  };

  function connect() {
    const stream = new EventSource('api/v1/stream');
    for (const kind of Object.keys(hear)) stream.addEventListener(kind, e => hear[kind](JSON.parse(e.data)));
    stream.addEventListener('open', () => { for (const run of runs.values()) run.samples = []; });
    stream.addEventListener('error', () => {
      const run = runs.get(shown);
      if (!run || !isOver(run)) say('board unreachable, retrying', 'offline');
    });
  }

  function start() {
    Lattice.start($('lattice'), showSeed, at => {
      const layer = Lattice.layers()[at.layer], stage = Lattice.stages[layer.stage[at.seed]];
      $('hint').textContent = place(at) + ': ' + stage + (layer.alpha[at.seed] ? ', α ' + number(+(layer.alpha[at.seed] / 255).toFixed(2)) : '') + '.';
    });
    pairs($('meanings'), [...Object.entries(Lattice.meanings), ...Object.entries(figureMeanings)]);
    $('smoothing').addEventListener('input', e => {
      Charts.options.smoothing = Number(e.target.value);
      $('smoothing-value').textContent = Charts.options.smoothing.toFixed(2);
      mark('curves');
    });
    $('axis').addEventListener('change', e => { Charts.options.axis = e.target.value; mark('curves'); });
    $('log').addEventListener('change', e => { Charts.options.log = e.target.checked; mark('curves'); });
    $('csv').addEventListener('click', () => save('runs.csv', new Blob([csv()], {type: 'text/csv'})));
    $('png').addEventListener('click', () => Charts.picture().toBlob(b => save('curves.png', b)));
    $('zoom-in').addEventListener('click', () => Lattice.zoom(1.5));
    $('zoom-out').addEventListener('click', () => Lattice.zoom(1 / 1.5));
    $('fit').addEventListener('click', Lattice.fit);
    addEventListener('resize', () => { Lattice.resized(); mark('status'); });
    matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => { Charts.restyle(); Lattice.redraw(); mark('curves', 'runs'); });
    const data = $('data');
    if (data) report(JSON.parse(data.textContent)); else { Steer.start(); connect(); }
  }

  // report shows the runs that a report contains.
  function report(data) {
    for (const r of data.runs) {
      hear.run(r.run);
      hear.series({...r.series, run: r.run.id, all: true});
      hear.groups({run: r.run.id, groups: r.groups || []});
      hear.samples({run: r.run.id, samples: r.samples || []});
      const run = get(r.run.id);
      run.lattice = r.lattice;
      run.history = r.history;
      run.seeds = new Map((r.seeds || []).map(s => [s.layer + '/' + s.seed, s]));
    }
    mark('runs', 'lattice', 'curves');
  }

  window.Board = {runs, csv, choose, shown: () => shown};
  start();
})();
