'use strict';
// Lattice draws a cell for each seed of each layer. The cells are the pixels of a small image, which is
// painted when seeds change. Moving and zooming take a single drawImage, however many seeds there are.
const Lattice = (() => {
  const stages = ['Dormant', 'Germinated', 'Training', 'Grafting', 'Stabilization', 'Evaluating', 'FineTuning',
    'Fossilized', 'Culled', 'Cancelled', 'RolledBack'];
  const meanings = {
    Dormant: 'The seed observes its part of the model and changes nothing.',
    Germinated: 'A blueprint, which is a small network, has been chosen. It does not affect the model yet.',
    Training: 'The blueprint learns alongside the model. It does not affect the model yet.',
    Grafting: 'The blueprint is being blended into the model: its weight α rises.',
    Stabilization: 'The blueprint is part of the model and learns with it.',
    Evaluating: 'The blueprint is frozen and on trial. If the run makes comparisons, it measures the loss with and without the blueprint.',
    FineTuning: 'The blueprint has passed its trial period and keeps learning.',
    Fossilized: 'The blueprint is a permanent part of the model.',
    Culled: 'The blueprint has failed and was removed.',
    Cancelled: 'The blueprint was abandoned before it became part of the model.',
    RolledBack: 'The blueprint was removed, and the model has the state that it would have without it.',
  };
  const colors = [[138, 143, 152], [214, 196, 60], [232, 150, 40], [222, 98, 42], [196, 92, 160], [128, 100, 212],
    [48, 128, 214], [34, 154, 88], [204, 50, 56], [140, 96, 76], [164, 32, 98]];
  const cell = 28; // largest size of a seed in pixels when all are shown
  let canvas, g, small, sg, blocks = [], gap = 2, width = 1, height = 1;
  let scale = 1, left = 0, top = 0, ratio = 1, scheduled = false, selected = null, onSelect = () => {}, onHover = () => {}, fitted = true;

  function bytes(text) {
    const raw = atob(text || ''), out = new Uint8Array(raw.length);
    for (let i = 0; i < raw.length; i++) out[i] = raw.charCodeAt(i);
    return out;
  }

  // layout places a block of cells for every layer on shelves about as wide as the canvas. A group of
  // seeds stays in one row.
  function layout(layers) {
    const few = layers.reduce((n, l) => n + Math.ceil(l.stage.length / 16), 0) < 24;
    gap = few ? 1 : 2;
    const sizes = layers.map(l => {
      const n = l.stage.length, group = Math.max(1, l.group), wide = Math.sqrt(n * (group > 1 ? 3 : 2));
      const columns = group === 1 && n <= 128 ? Math.max(n, 1) : Math.min(Math.max(n, 1), group * Math.max(1, Math.round(wide / group)));
      return {columns, rows: Math.max(1, Math.ceil(n / columns)), room: Math.max(columns, Math.ceil(label(l, layers).length / 4))};
    });
    const area = sizes.reduce((s, b) => s + (b.room + gap) * (b.rows + gap), 0);
    const shelf = Math.max(...sizes.map(b => b.room), Math.sqrt(area * canvas.clientWidth / 200));
    let x = 0, y = gap, tall = 0;
    width = 1;
    blocks = layers.map((layer, i) => {
      const {columns, rows, room} = sizes[i];
      if (x > 0 && x + room > shelf) { x = 0; y += tall + gap; tall = 0; }
      const block = {layer, x, y, columns, rows, label: label(layer, layers)};
      x += room + gap;
      tall = Math.max(tall, rows);
      width = Math.max(width, x - gap);
      return block;
    });
    height = y + tall;
    const ideal = (height + 1) * Math.min(cell, canvas.clientWidth / (width + 1));
    canvas.style.height = Math.round(Math.max(80, Math.min(ideal, 420, innerHeight * 0.6))) + 'px';
  }

  // label returns the name of a layer, with its site if there are several sites.
  function label(layer, layers) {
    const same = layers.every(l => l.site === layers[0].site);
    return layer.name + (same || layer.name.startsWith(layer.site) ? '' : ', ' + layer.site);
  }

  function set(picture) {
    const layers = picture.layers.map(l => ({name: l.name, site: l.site, slots: l.slots || 0, group: l.group || 1, stage: bytes(l.stage),
      alpha: bytes(l.alpha), health: bytes(l.health), kind: bytes(l.kind)}));
    const same = blocks.length === layers.length && layers.every((l, i) => l.stage.length === blocks[i].layer.stage.length);
    if (same) layers.forEach((l, i) => { blocks[i].layer = l; }); else layout(layers);
    paint();
    if (!same || fitted) fit();
    redraw();
  }

  // paint paints the small image.
  function paint() {
    if (small.width !== width || small.height !== height) { small.width = width; small.height = height; }
    const image = sg.createImageData(width, height), pixels = image.data;
    for (const b of blocks) {
      const {stage, health} = b.layer;
      for (let i = 0; i < stage.length; i++) {
        const at = 4 * ((b.y + Math.floor(i / b.columns)) * width + b.x + i % b.columns);
        const c = colors[stage[i]] || colors[0], light = 0.3 + 0.7 * health[i] / 255;
        pixels[at] = c[0] * light; pixels[at + 1] = c[1] * light; pixels[at + 2] = c[2] * light; pixels[at + 3] = 255;
      }
    }
    sg.putImageData(image, 0, 0);
  }

  function fit() {
    fitted = true;
    scale = Math.min(canvas.clientWidth / (width + 1), canvas.clientHeight / (height + 1), cell);
    left = (canvas.clientWidth - width * scale) / 2;
    top = (canvas.clientHeight - height * scale) / 2;
    redraw();
  }

  function redraw() {
    if (scheduled) return;
    scheduled = true;
    requestAnimationFrame(draw);
  }

  function draw() {
    scheduled = false;
    const w = Math.round(canvas.clientWidth * ratio), h = Math.round(canvas.clientHeight * ratio);
    if (canvas.width !== w || canvas.height !== h) { canvas.width = w; canvas.height = h; }
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    g.clearRect(0, 0, w, h);
    g.imageSmoothingEnabled = scale < 1;
    g.drawImage(small, left, top, width * scale, height * scale);
    const style = getComputedStyle(document.documentElement);
    if (scale >= 6) grid(style);
    names(style);
    if (selected) frame(style);
  }

  // grid draws lines between the visible cells.
  function grid(style) {
    g.strokeStyle = style.getPropertyValue('--back');
    g.lineWidth = 1;
    g.beginPath();
    for (const b of blocks) {
      const x0 = left + b.x * scale, y0 = top + b.y * scale, x1 = x0 + b.columns * scale, y1 = y0 + b.rows * scale;
      for (let i = 1; i < b.columns; i++) { const x = x0 + i * scale; if (x > 0 && x < canvas.clientWidth) { g.moveTo(x, y0); g.lineTo(x, y1); } }
      for (let i = 1; i < b.rows; i++) { const y = y0 + i * scale; if (y > 0 && y < canvas.clientHeight) { g.moveTo(x0, y); g.lineTo(x1, y); } }
    }
    g.stroke();
  }

  function names(style) {
    g.fillStyle = style.getPropertyValue('--soft');
    g.font = '12px sans-serif';
    for (const b of blocks) {
      if (gap * scale < 9) continue;
      g.fillText(b.label, left + b.x * scale, top + b.y * scale - 2);
    }
  }

  function frame(style) {
    const b = blocks[selected.layer];
    if (!b) return;
    const s = Math.max(scale, 5);
    g.strokeStyle = style.getPropertyValue('--text');
    g.lineWidth = 2;
    g.strokeRect(left + (b.x + selected.seed % b.columns) * scale, top + (b.y + Math.floor(selected.seed / b.columns)) * scale, s, s);
  }

  // at returns the seed at a point of the canvas.
  function at(x, y) {
    const cx = Math.floor((x - left) / scale), cy = Math.floor((y - top) / scale);
    for (let layer = 0; layer < blocks.length; layer++) {
      const b = blocks[layer], column = cx - b.x, row = cy - b.y;
      if (column < 0 || row < 0 || column >= b.columns || row >= b.rows) continue;
      const seed = row * b.columns + column;
      if (seed < b.layer.stage.length) return {layer, seed};
    }
    return null;
  }

  function select(where) {
    selected = where;
    redraw();
    if (where) onSelect(where);
  }

  function zoom(by, x = canvas.clientWidth / 2, y = canvas.clientHeight / 2) {
    const next = Math.max(0.2, Math.min(60, scale * by));
    left = x - (x - left) * next / scale;
    top = y - (y - top) * next / scale;
    scale = next;
    fitted = false;
    redraw();
  }

  function pan(dx, dy) { left += dx; top += dy; fitted = false; redraw(); }

  function key(e) {
    const b = selected && blocks[selected.layer];
    const by = {ArrowLeft: -1, ArrowRight: 1, ArrowUp: b ? -b.columns : 0, ArrowDown: b ? b.columns : 0}[e.key];
    if (e.key === '+') zoom(1.3);
    else if (e.key === '-') zoom(1 / 1.3);
    else if (e.key === '0') fit();
    else if (by !== undefined) {
      if (!b) select({layer: 0, seed: 0});
      else {
        let {layer, seed} = selected;
        seed += by;
        if (seed < 0 && layer > 0) { layer--; seed = blocks[layer].layer.stage.length - 1; }
        else if (seed >= b.layer.stage.length && layer + 1 < blocks.length) { layer++; seed = 0; }
        if (seed >= 0 && seed < blocks[layer].layer.stage.length) select({layer, seed});
      }
    } else return;
    e.preventDefault();
  }

  function start(element, select_, hover) {
    canvas = element;
    onSelect = select_;
    onHover = hover;
    g = canvas.getContext('2d');
    small = document.createElement('canvas');
    sg = small.getContext('2d');
    ratio = devicePixelRatio || 1;
    let held = null;
    canvas.addEventListener('pointerdown', e => { held = {x: e.offsetX, y: e.offsetY, moved: false}; canvas.setPointerCapture(e.pointerId); });
    canvas.addEventListener('pointermove', e => {
      if (!held) { const found = at(e.offsetX, e.offsetY); if (found) onHover(found); return; }
      const dx = e.offsetX - held.x, dy = e.offsetY - held.y;
      if (!held.moved && Math.hypot(dx, dy) < 4) return;
      pan(dx, dy);
      held = {x: e.offsetX, y: e.offsetY, moved: true};
    });
    canvas.addEventListener('pointerup', e => {
      if (held && !held.moved) { const found = at(e.offsetX, e.offsetY); if (found) select(found); }
      held = null;
    });
    canvas.addEventListener('pointercancel', () => { held = null; });
    canvas.addEventListener('wheel', e => {
      if (!e.ctrlKey && document.activeElement !== canvas) return; // let the page scroll past the canvas
      e.preventDefault();
      zoom(e.deltaY < 0 ? 1.15 : 1 / 1.15, e.offsetX, e.offsetY);
    }, {passive: false});
    canvas.addEventListener('keydown', key);
  }

  function resized() { if (blocks.length) { if (fitted) { layout(blocks.map(b => b.layer)); paint(); fit(); } redraw(); } }
  function color(stage) { return 'rgb(' + (colors[stages.indexOf(stage)] || colors[0]).join(',') + ')'; }
  function layers() { return blocks.map(b => b.layer); }
  function chosen() { return selected; }

  // history draws a row for each seed of a history that has changed, colored by its stages.
  function history(element, {epochs, rows}) {
    rows = rows.filter(row => row && row.length);
    const width = Math.min(1200, Math.max(200, epochs));
    element.width = width;
    element.height = rows.length;
    element.style.height = Math.min(240, Math.max(24, rows.length * 4)) + 'px';
    const context = element.getContext('2d');
    rows.forEach((row, y) => {
      const changes = [...row, epochs, 0];
      let from = 0, stage = 0;
      for (let i = 0; i < changes.length; i += 2) {
        const to = Math.round(changes[i] / epochs * width);
        context.fillStyle = color(stages[stage]);
        context.fillRect(from, y, Math.max(0, to - from), 1);
        from = to;
        stage = changes[i + 1];
      }
    });
  }

  // center returns the position of a seed on the canvas.
  function center(layer, seed) {
    const b = blocks[layer];
    return {x: left + (b.x + seed % b.columns + 0.5) * scale, y: top + (b.y + Math.floor(seed / b.columns) + 0.5) * scale};
  }

  return {meanings, start, set, fit, zoom, pan, resized, select, chosen, color, stages, layers, center, redraw, history};
})();
