'use strict';
// The page: what the stream tells goes into runs, and from there, once a frame at most, on the screen.
// Text of runs is only ever set as text, never as HTML.
(() => {
  const $ = id => document.getElementById(id);
  const runs = new Map();
  let shown = null; // the run whose tiles, seeds and samples are shown
  let cards = []; // the GPUs
  let dirty = new Set(), wanted = false, lattice = {fetched: -1, busy: false};

  function get(id) {
    if (!runs.has(id)) {
      runs.set(id, {id, index: runs.size, name: id, status: {}, series: {}, events: [], samples: [], version: 0, hidden: false});
    }
    return runs.get(id);
  }

  // mark has parts of the page drawn with the next frame.
  function mark(...parts) {
    for (const p of parts) dirty.add(p);
    if (wanted) return;
    wanted = true;
    requestAnimationFrame(() => { wanted = false; const d = dirty; dirty = new Set(); draw(d); });
  }

  function draw(d) {
    const run = shown && runs.get(shown);
    if (!run) return;
    if (d.has('runs')) drawRuns();
    if (d.has('status')) drawStatus(run);
    if (d.has('curves')) Charts.draw([...runs.values()].filter(r => !r.hidden));
    if (d.has('events')) drawEvents(run);
    if (d.has('samples')) drawSample(run);
    if (d.has('lattice')) fetchLattice(run);
    performance.mark('drawn');
  }

  const number = Charts.number;
  function clock(s) {
    if (s === null || s === undefined) return '–';
    s = Math.round(s);
    const h = Math.floor(s / 3600), m = Math.floor(s / 60) % 60, two = n => String(n).padStart(2, '0');
    return h ? h + ':' + two(m) + ':' + two(s % 60) : m + ':' + two(s % 60);
  }
  function rate(v) {
    if (v === null || v === undefined) return '–';
    for (const [size, letter] of [[1e12, 'T'], [1e9, 'G'], [1e6, 'M'], [1e3, 'k']]) {
      if (v >= size) return (v / size).toFixed(v >= 100 * size ? 0 : letter === 'k' ? 1 : 2) + ' ' + letter;
    }
    return v.toFixed(0);
  }
  function percent(v) { return Math.round(100 * v) + ' %'; }

  // gauges are the tiles of a GPU. What it does not tell is left out.
  function gauges(c) {
    const of = 'GPU ' + c.index, tiles = [];
    if (c.power_w) tiles.push([of + ' power', number(Math.round(c.power_w)) + (c.power_limit_w ? ' of ' + number(Math.round(c.power_limit_w)) : '') + ' W']);
    if (c.memory_total_bytes) tiles.push([of + ' memory', gib(c.memory_used_bytes) + ' of ' + gib(c.memory_total_bytes) + ' GiB']);
    if (c.busy) tiles.push([of + ' busy', percent(c.busy)]);
    return tiles;
  }
  function gib(bytes) { return (bytes / 2 ** 30).toFixed(1); }

  function pairs(list, entries) {
    while (list.children.length > entries.length) list.lastChild.remove();
    entries.forEach(([name, text], i) => {
      let div = list.children[i];
      if (!div) {
        div = document.createElement('div');
        div.append(document.createElement('dt'), document.createElement('dd'));
        list.append(div);
      }
      if (div.firstChild.textContent !== name) div.firstChild.textContent = name;
      if (div.lastChild.textContent !== text) div.lastChild.textContent = text;
    });
  }

  function drawStatus(run) {
    const s = run.status;
    const words = {waiting: 'waiting for its first step', running: 'running', ended: 'ended', stopped: 'stopped', failed: 'failed',
      silent: 'silent: its log has not changed for minutes, so it is busy or was killed'};
    say((run.name === 'run' ? '' : run.name + ': ') + (words[s.state] || s.state || '') + (s.error ? ': ' + s.error : ''), s.state === 'failed');
    document.title = 'Kasmina' + (s.share ? ' ' + Math.floor(100 * s.share) + ' %' : '');
    const tiles = [['step', s.step + (s.steps ? ' of ' + s.steps : '')], ['training loss', number(s.loss)],
      ['held-out loss', number(s.val_loss)], ['bits per byte', number(s.val_bpb)], ['tokens per second', rate(s.tokens_per_s)],
      ['time left', s.state === 'running' ? clock(s.left_s) : '–'], ['elapsed', clock(s.elapsed_s)], ['learning rate', number(s.learning_rate)],
      ['gradient norm', number(s.grad_norm)], ['parameters', rate(s.params)]];
    if (s.budget) tiles.push(['budget', s.budget]);
    if (s.ceiling_share) tiles.push(['share of the ceiling', percent(s.ceiling_share) + ' of ' + rate(s.ceiling_flops_per_s) + 'FLOP/s']);
    for (const c of cards) tiles.push(...gauges(c));
    if (s.saved) tiles.push(['saved at step', String(s.saved_step)]);
    if (s.dropped) tiles.push(['events not shown', String(s.dropped)]);
    pairs($('tiles'), tiles);
    drawLegend(s.stages || {});
  }

  function drawLegend(counts) {
    const names = Lattice.stages.filter(n => counts[n]);
    $('lattice-section').hidden = !names.length;
    const list = $('legend');
    while (list.children.length > names.length) list.lastChild.remove();
    names.forEach((name, i) => {
      let item = list.children[i];
      if (!item) {
        item = document.createElement('li');
        const key = document.createElement('span');
        key.className = 'key';
        item.append(key, document.createElement('span'));
        list.append(item);
      }
      item.firstChild.style.background = Lattice.colour(name);
      item.lastChild.textContent = name + ' ' + counts[name];
    });
  }

  function drawRuns() {
    const all = [...runs.values()];
    if (all.length > 1) $('runs').replaceChildren(...all.map(run => {
      const item = document.createElement('li'), box = document.createElement('input'), label = document.createElement('label');
      const key = document.createElement('span'), show = document.createElement('button');
      box.type = 'checkbox';
      box.checked = !run.hidden;
      box.addEventListener('change', () => { run.hidden = !box.checked; mark('curves'); });
      key.className = 'key';
      key.style.background = Charts.colour(run.index);
      label.append(box, ' ', key, run.name);
      show.type = 'button';
      show.textContent = 'details';
      show.setAttribute('aria-label', 'details of ' + run.name);
      show.setAttribute('aria-pressed', String(run.id === shown));
      show.addEventListener('click', () => choose(run.id));
      item.append(label, ' ', show);
      return item;
    }));
    drawSettings(all);
    $('runs-section').hidden = all.length < 2 && $('settings-box').hidden;
    $('runs-title').textContent = all.length > 1 ? 'Runs' : 'Run';
  }

  function drawSettings(all) {
    const names = [...new Set(all.flatMap(r => Object.keys(r.status.settings || {})))].sort()
      .filter(n => all.length === 1 || new Set(all.map(r => (r.status.settings || {})[n])).size > 1);
    if (all.length === 1) $('settings-box').firstElementChild.textContent = 'Settings';
    $('settings-box').hidden = !names.length;
    const row = (tag, cells) => {
      const tr = document.createElement('tr');
      cells.forEach((text, i) => {
        const cell = document.createElement(i ? tag : 'th');
        cell.textContent = text === undefined ? '–' : text;
        tr.append(cell);
      });
      return tr;
    };
    $('settings').replaceChildren(row('th', ['setting', ...all.map(r => r.name)]),
      ...names.map(n => row('td', [n, ...all.map(r => (r.status.settings || {})[n])])));
  }

  function choose(id) {
    shown = id;
    lattice.fetched = -1;
    Lattice.select(null);
    $('seed').hidden = true;
    mark('runs', 'status', 'curves', 'events', 'samples', 'lattice');
  }

  const figureMeanings = {
    'slot': 'Which row of the layer\'s weights the blueprint has.',
    'α': 'The share with which the blueprint is blended into the model, from 0 to 1.',
    'lowers the loss by': 'How much lower the held-out loss is with the seed than without it; below 0 the model is better without.',
    'that is a share of': 'The same as a share of the loss without the seed.',
    'stability': 'The share of the held-out batches in which the seed helps, or harms, as it does on the whole.',
    'dead features': 'The share of the activations that the seed watches which are all but 0.',
    'drift': 'How much the mean and the variance of these activations moved in the last epoch, relative to what they were.',
  };

  // story says what an event is, with why, in words.
  function story(e) {
    switch (e.kind) {
      case 'StageChanged': return e.from + ' → ' + e.to;
      case 'GateOpened': return 'the gate from ' + e.from + ' to ' + e.to + ' is open';
      case 'RampFinished': return 'the ramp has ended at α = ' + number(e.value);
      case 'EmbargoOver': return 'may be recycled';
      case 'Noted': return e.to;
      case 'Refused': return 'a command was refused: ' + e.to + '; it was given';
      case 'NonFinite': return number(e.value) + ' NaN or Inf were met';
    }
    return e.kind;
  }

  // place names a seed, where several layers have some.
  function place(e) {
    const layer = Lattice.layers()[e.layer];
    return e.place || (layer ? layer.name : 'layer ' + e.layer) + ', seed ' + e.seed;
  }

  // eventItem shows an event, or several that differ by the seed alone.
  function eventItem(group, where) {
    const e = group[0], item = document.createElement('li');
    item.append((e.step ? 'step ' + e.step + ', ' : '') + 'epoch ' + e.epoch + ': ');
    if (where && e.layer >= 0) {
      if (group.length > 1) item.append(group.length + ' seeds: ');
      group.slice(0, group.length > 4 ? 3 : 4).forEach((one, i) => {
        const b = document.createElement('button');
        b.type = 'button';
        b.className = 'link';
        b.textContent = place(one);
        b.addEventListener('click', () => visit({layer: one.layer, seed: one.seed}));
        item.append(i ? '; ' : '', b);
      });
      if (group.length > 4) item.append(' and ' + (group.length - 3) + ' more');
      item.append(': ');
    }
    item.append(story(e));
    if (e.reason) {
      const why = document.createElement('span');
      why.className = 'why';
      why.textContent = ' because ' + e.reason;
      item.append(why);
    }
    return item;
  }

  // visit shows a seed that something else on the page names.
  function visit(at) {
    const layer = Lattice.layers()[at.layer];
    if (!layer || at.seed >= layer.stage.length) return;
    Lattice.select(at);
    $('lattice-section').scrollIntoView();
    $('lattice').focus({preventScroll: true});
  }

  // grouped joins events that follow each other and differ by the seed alone.
  function grouped(events) {
    const key = e => [e.step, e.epoch, e.kind, e.from, e.to, e.value, e.reason].join('\n'), groups = [];
    let last = null;
    for (const e of events) {
      if (key(e) === last) groups[groups.length - 1].push(e); else groups.push([e]);
      last = key(e);
    }
    return groups;
  }

  // drawEvents shows the latest events. In an epoch those of one kind come together, whichever layer they are of.
  function drawEvents(run) {
    const told = run.events.filter(e => e.kind !== 'GateOpened').slice(-1000);
    $('events-section').hidden = !told.length;
    $('events').replaceChildren(...grouped(told).slice(-100).reverse().map(g => eventItem(g, true)));
  }

  function drawSample(run) {
    const s = run.samples[run.samples.length - 1];
    $('samples-section').hidden = !s;
    if (!s) return;
    $('sample-step').textContent = 'after step ' + s.step;
    $('sample').textContent = s.text;
  }

  // fetchLattice asks for the picture, at most twice a second.
  async function fetchLattice(run) {
    if (run.lattice) { showLattice(run.lattice); return; }
    if (lattice.busy || run.version === lattice.fetched || !run.version) return;
    lattice.busy = true;
    if (lattice.fetched < 0) Steer.learn(); // of the kinds of the run's seeds
    lattice.fetched = run.version;
    try {
      const answer = await fetch('api/v1/runs/' + run.id + '/lattice');
      if (answer.ok && run.id === shown) showLattice(await answer.json());
    } catch { lattice.fetched = -1; } // the stream says when the board is back
    setTimeout(() => { lattice.busy = false; mark('lattice'); }, 500);
  }

  function showLattice(picture) {
    $('lattice-section').hidden = false;
    Lattice.set(picture);
    const names = shown + Lattice.layers().map(l => '\n' + l.name).join('');
    if (names !== lattice.names) { lattice.names = names; mark('events'); } // which are named by layers
    const at = Lattice.chosen();
    if (at) showSeed(at);
  }

  let asked = 0;
  async function showSeed(at) {
    const turn = ++asked, run = runs.get(shown);
    let seed;
    if (run.seeds) seed = run.seeds(at);
    else {
      try {
        const answer = await fetch('api/v1/runs/' + run.id + '/seeds/' + at.layer + '/' + at.seed);
        if (!answer.ok) return;
        seed = await answer.json();
      } catch { return; }
    }
    if (turn !== asked) return;
    $('seed').hidden = false;
    const layer = Lattice.layers()[at.layer];
    $('seed-title').textContent = place({...at, place: seed.place}) + ': ' + seed.stage;
    const last = [...(seed.events || [])].reverse().find(e => e.kind === 'StageChanged');
    $('seed-story').textContent = (Lattice.meanings[seed.stage] || '') + ' ' + (last ? 'It went from ' + last.from + ' to ' + last.to +
      (last.step ? ' after step ' + last.step : '') + ', epoch ' + last.epoch + (last.reason ? ', because ' + last.reason : '') + '.' :
      'Nothing has happened to it yet.');
    $('seed-waits').hidden = !seed.waits_for;
    $('seed-waits').textContent = seed.waits_for ? 'For the next stage it lacks ' + seed.waits_for + '.' : '';
    const figures = [['epochs in stage', String(seed.epochs_in_stage)], ['α', number(seed.alpha)]];
    if (seed.kind) figures.push(['blueprint', seed.kind]);
    if (seed.slot) figures.push(['slot', String(seed.slot)]);
    for (const [name, key] of [['lowers the loss by', 'delta'], ['that is a share of', 'improvement'], ['stability', 'stability'],
      ['variance', 'variance'], ['mean', 'mean'], ['dead features', 'dead_ratio'], ['drift', 'drift'], ['gradient norm', 'grad_norm']]) {
      if (seed[key] !== undefined) figures.push([name, number(seed[key])]);
    }
    figures.push(['NaN and Inf', String(seed.non_finite || 0)], ['may advance', seed.can_advance ? 'yes' : 'no']);
    pairs($('seed-figures'), figures);
    $('seed-events').replaceChildren(...[...(seed.events || [])].reverse().map(e => eventItem([e], false)));
    if (!run.seeds) Steer.seed(run, at, seed, layer);
  }

  function say(text, bad) {
    const p = $('state');
    if (p.textContent !== text) p.textContent = text;
    p.classList.toggle('bad', !!bad);
  }

  function save(name, blob) {
    const a = document.createElement('a');
    a.href = URL.createObjectURL(blob);
    a.download = name;
    a.click();
    setTimeout(() => URL.revokeObjectURL(a.href), 1000);
  }

  // csvText returns text as a cell of CSV. Spreadsheets take text that begins with certain characters
  // for a formula, unless a quote is in front of it. Text that is a number is left as it is.
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

  const columns = ['step', 'time', 'loss', 'learning_rate', 'grad_norm', 'tokens_per_s', 'eval_step', 'eval_time', 'val_loss', 'val_bpb'];
  let board = null; // which one the stream is of
  const hear = {
    // Another board has the address now, with runs of its own.
    board(b) {
      if (board !== null && board !== b.id) location.reload();
      board = b.id;
    },
    // What the page knows of a run is no longer so: it was resumed, or another run has taken its place.
    again(m) {
      const run = get(m.run);
      run.series = {};
      run.events = [];
      run.samples = [];
      if (run.id === shown) choose(run.id); else mark('curves');
    },
    cards(all) { cards = all; mark('status'); },
    run(s) {
      const fresh = !runs.has(s.id), run = get(s.id);
      run.status = s;
      run.name = s.name;
      if (shown === null || fresh && s.state !== 'ended') choose(s.id);
      mark('status', ...(fresh ? ['runs', 'curves'] : []));
    },
    series(m) {
      const run = get(m.run);
      for (const c of columns) run.series[c] = m.all ? m[c] || [] : (run.series[c] || []).concat(m[c] || []);
      mark('curves');
    },
    lattice(m) { get(m.run).version = m.version; mark('lattice'); },
    events(m) {
      const run = get(m.run), last = run.events.length ? run.events[run.events.length - 1].number : -1;
      run.events = run.events.concat(m.events.filter(e => e.number > last)).slice(-1000);
      mark('events');
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
      const run = runs.get(shown), s = run && run.status.state;
      if (s !== 'ended' && s !== 'stopped' && s !== 'failed') say('the board cannot be reached; trying again', true);
    });
  }

  function start() {
    Lattice.start($('lattice'), showSeed, at => {
      const layer = Lattice.layers()[at.layer], stage = Lattice.stages[layer.stage[at.seed]];
      $('hint').textContent = place(at) + ': ' + stage + (layer.alpha[at.seed] ? ', α ' + number(+(layer.alpha[at.seed] / 255).toFixed(2)) : '') + '.';
    });
    pairs($('meanings'), [...Object.entries(Lattice.meanings), ...Object.entries(figureMeanings)]);
    $('axis').addEventListener('change', e => { Charts.options.axis = e.target.value; mark('curves'); });
    $('log').addEventListener('change', e => { Charts.options.log = e.target.checked; mark('curves'); });
    $('csv').addEventListener('click', () => save('runs.csv', new Blob([csv()], {type: 'text/csv'})));
    $('png').addEventListener('click', () => Charts.picture().toBlob(b => save('curves.png', b)));
    $('zoom-in').addEventListener('click', () => Lattice.zoom(1.5));
    $('zoom-out').addEventListener('click', () => Lattice.zoom(1 / 1.5));
    $('fit').addEventListener('click', Lattice.fit);
    addEventListener('resize', Lattice.resized);
    matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => { Charts.restyle(); Lattice.want(); mark('curves'); });
    const data = $('data');
    if (data) report(JSON.parse(data.textContent)); else { Steer.start(); connect(); }
  }

  // report shows runs that the page holds itself.
  function report(data) {
    for (const r of data.runs) {
      hear.run(r.run);
      hear.series({...r.series, run: r.run.id, all: true});
      hear.events({run: r.run.id, events: r.events || []});
      hear.samples({run: r.run.id, samples: r.samples || []});
      const run = get(r.run.id);
      run.lattice = r.lattice;
      run.seeds = at => ({...(r.seeds || {})[at.layer + '/' + at.seed], stage: Lattice.stages[Lattice.layers()[at.layer].stage[at.seed]],
        epochs_in_stage: '–', alpha: Lattice.layers()[at.layer].alpha[at.seed] / 255,
        events: run.events.filter(e => e.layer === at.layer && e.seed === at.seed)});
    }
    const one = data.runs[0];
    $('history-section').hidden = !(one.events.length && one.lattice.layers.length);
    if (!$('history-section').hidden) Lattice.history($('history'), one.lattice, one.events);
    mark('runs', 'lattice', 'curves');
  }

  window.Board = {runs, csv, choose, shown: () => shown};
  start();
})();
