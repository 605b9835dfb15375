'use strict';
// Charts draws the curves of all runs with uPlot. A chart joins the columns of its runs by the
// horizontal axis.
const Charts = (() => {
  const kinds = [
    {id: 'loss', title: 'Loss (nats per token)', columns: [['loss', 'step', 'time'], ['val_loss', 'eval_step', 'eval_time']], log: true, smooth: true},
    {id: 'bpb', title: 'Held-out loss (bits per byte)', columns: [['val_bpb', 'eval_step', 'eval_time']]},
    {id: 'norm', title: 'Gradient norm', columns: [['grad_norm', 'step', 'time']], smooth: true},
    {id: 'speed', title: 'Tokens per second', columns: [['tokens_per_s', 'step', 'time']], smooth: true},
    {id: 'rate', title: 'Learning rate', columns: [['learning_rate', 'step', 'time']]},
  ];
  const charts = new Map(); // by kind: {plot, figure, shape, curves, found}
  const options = {axis: 'step', log: false, smoothing: 0.8};
  let markers = []; // of the run that is shown: {step, time, color, text, grown}

  function style(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }
  function color(i) { return style('--c' + i % 8); }

  // number formats a figure with up to five significant digits.
  function number(v) {
    if (v === null || v === undefined) return '–';
    const a = Math.abs(v);
    return a !== 0 && (a < 1e-4 || a >= 1e6) ? v.toExponential(3).replace(/\.?0+e/, 'e') : String(+v.toPrecision(5));
  }

  // tick formats a label of an axis.
  function tick(v) {
    const a = Math.abs(v);
    for (const [size, letter] of [[1e9, 'G'], [1e6, 'M'], [1e4, 'k']]) {
      if (a >= size) return +(v / (letter === 'k' ? 1e3 : size)).toPrecision(4) + letter;
    }
    return number(v);
  }

  function clock(s) {
    s = Math.round(s);
    const h = Math.floor(s / 3600), m = Math.floor(s / 60) % 60, two = n => String(n).padStart(2, '0');
    return h ? h + ':' + two(m) + ':' + two(s % 60) : m + ':' + two(s % 60);
  }

  // tables returns the curves of a chart that have points.
  function tables(kind, runs) {
    const found = [];
    for (const run of runs) {
      kind.columns.forEach(([name, step, time], part) => {
        const x = run.series[options.axis === 'step' ? step : time], y = run.series[name];
        if (!x || !x.length || !y.some(v => v !== null)) return;
        const heldOut = part > 0 || name === 'val_bpb';
        found.push({run, heldOut, smooth: kind.smooth && !heldOut && options.smoothing > 0, label: label(kind, run, heldOut, runs.length),
          color: color(runs.length > 1 ? run.index : part || heldOut ? 1 : 0), dashed: part > 0 && runs.length > 1, data: sorted(x, y)});
      });
    }
    return found;
  }

  function label(kind, run, heldOut, count) {
    if (count > 1) return run.name + (kind.id === 'loss' ? heldOut ? ', held-out' : ', training' : '');
    return heldOut ? 'held-out' : kind.id === 'loss' ? 'training' : '';
  }

  // sorted drops points that are not to the right of all earlier ones, because uPlot requires
  // increasing x.
  function sorted(x, y) {
    let ordered = true;
    for (let i = 1; i < x.length; i++) if (!(x[i] > x[i - 1])) { ordered = false; break; }
    if (ordered) return [x, y];
    const a = [], b = [];
    for (let i = 0; i < x.length; i++) if (!a.length || x[i] > a[a.length - 1]) { a.push(x[i]); b.push(y[i]); }
    return [a, b];
  }

  // smoothed returns the exponential moving average of a column. Dividing by the sum of the weights
  // keeps the first values from being pulled towards 0.
  function smoothed(y) {
    const w = options.smoothing;
    let sum = 0, weight = 0;
    return y.map(v => {
      if (v === null || !isFinite(v)) return v;
      sum = w * sum + (1 - w) * v;
      weight = w * weight + 1 - w;
      return sum / weight;
    });
  }

  // columns returns the data of a chart: a smooth curve adds a second column to the measured one.
  function columns(found) {
    const all = found.map(f => f.smooth ? [...f.data, smoothed(f.data[1])] : f.data);
    return all.length === 1 ? all[0] : uPlot.join(all);
  }

  function last(column) {
    for (let i = column.length - 1; i >= 0; i--) if (column[i] !== null && column[i] !== undefined) return column[i];
    return null;
  }

  // height returns the height of a plot, so that a large one ends where its neighbors do.
  function height(figure) {
    const wide = innerWidth > 68 * 16, large = figure.classList.contains('large');
    return large ? wide ? 430 : 300 : 175;
  }

  function build(kind, c, found) {
    const line = {stroke: style('--soft'), font: '12px system-ui, sans-serif', grid: {stroke: style('--grid'), width: 1}, ticks: {show: false}};
    const series = [{}];
    for (const f of found) {
      const dots = f.data[0].length < 40 || f.heldOut && f.data[0].length < 100;
      const curve = {stroke: f.color, width: f.heldOut ? 2 : 1.6, dash: f.dashed ? [5, 4] : undefined, spanGaps: true,
        points: {show: dots, size: 5, fill: f.color, width: 0}};
      if (f.smooth) {
        series.push({...curve, width: 1, alpha: found.length > 4 ? 0.12 : 0.3, points: {show: false}}, {...curve, width: 2, points: {show: false}});
      } else {
        series.push(curve);
      }
    }
    return new uPlot({width: c.figure.clientWidth || 400, height: height(c.figure), series, legend: {show: false},
      cursor: {sync: {key: 'kasmina'}, points: {size: 7}}, padding: [8, 18, 0, 0],
      scales: {x: {time: false}, y: {distr: kind.log && options.log ? 3 : 1}},
      axes: [{...line, size: 26, values: (u, all) => all.map(v => v === null ? '' : options.axis === 'time' ? clock(v) : tick(v))},
        {...line, size: 50, values: (u, all) => all.map(v => v === null ? '' : tick(v))}],
      hooks: {drawAxes: [drawMarkers], setCursor: [u => { values(c, u.cursor.idx); tip(c, u); }]}},
    columns(found), c.figure.querySelector('.plot'));
  }

  // drawMarkers draws changes of the model as dashed lines, and changes of seeds as ticks.
  function drawMarkers(u) {
    const g = u.ctx, {left, top, width, height: h} = u.bbox, ratio = devicePixelRatio || 1;
    g.save();
    for (const m of markers) {
      const x = Math.round(u.valToPos(m[options.axis], 'x', true));
      if (x < left || x > left + width) continue;
      g.beginPath();
      g.strokeStyle = m.grown ? style('--text') : m.color;
      g.globalAlpha = m.grown ? 0.6 : 1;
      g.lineWidth = (m.grown ? 1.2 : 2.5) * ratio;
      g.setLineDash(m.grown ? [4 * ratio, 4 * ratio] : []);
      g.moveTo(x, m.grown ? top : top + h - 7 * ratio);
      g.lineTo(x, top + h);
      g.stroke();
    }
    g.restore();
    drawLabels(u, ratio);
  }

  // drawLabels writes the changes of the model next to the lines of a large chart, shortened to the
  // distance between the lines.
  function drawLabels(u, ratio) {
    if (u.height < 250) return;
    const g = u.ctx, {left, top, width} = u.bbox;
    g.save();
    g.font = 11 * ratio + 'px system-ui, sans-serif';
    g.textAlign = 'left';
    g.fillStyle = style('--soft');
    const grown = markers.filter(m => m.grown).map(m => ({x: u.valToPos(m[options.axis], 'x', true), text: m.text}));
    grown.forEach(({x, text}, i) => {
      const end = i + 1 < grown.length ? Math.min(grown[i + 1].x, left + width) : left + width, room = end - x - 10 * ratio;
      if (x < left || room < 40 * ratio) return;
      let short = text;
      while (short.length > 4 && g.measureText(short + '…').width > room) short = short.slice(0, -1);
      g.fillText(short === text ? text : short + '…', x + 5 * ratio, top + 10 * ratio);
    });
    g.restore();
  }

  // tip describes the markers near the cursor.
  function tip(c, u) {
    const {left, top} = u.cursor;
    const near = left < 0 ? [] : markers.filter(m => Math.abs(u.valToPos(m[options.axis], 'x') - left) < 5);
    if (!near.length) { c.tip.hidden = true; return; }
    const texts = near.slice(0, 6).map(m => 'step ' + m.step + ': ' + m.text);
    c.tip.textContent = texts.join('; ') + (near.length > 6 ? '; …' : '');
    c.tip.hidden = false;
    const room = c.figure.clientWidth - c.tip.offsetWidth - 4;
    c.tip.style.left = Math.max(0, Math.min(room, left + 60)) + 'px';
    c.tip.style.top = c.figure.querySelector('.plot').offsetTop + Math.max(0, top - 34) + 'px';
  }

  // values writes the values under the cursor into the legend, or the last ones without a cursor.
  function values(c, index) {
    const data = c.plot ? c.plot.data : columns(c.found);
    const at = index === null || index === undefined ? null : index;
    c.position.textContent = at === null ? '' : options.axis === 'step' ? 'step ' + data[0][at] : clock(data[0][at]);
    let column = 1;
    c.found.forEach((f, i) => {
      const read = from => at === null ? last(from) : from[at];
      const item = c.values[i], value = number(read(data[column]));
      if (item.firstChild.textContent !== value) item.firstChild.textContent = value;
      item.lastChild.textContent = f.smooth && c.found.length < 5 ? ' (smoothed ' + number(read(data[column + 1])) + ')' : '';
      column += f.smooth ? 2 : 1;
    });
  }

  const listed = 12; // curves in a legend; the table of runs has the figures of all

  // relabel builds the legend of a chart.
  function relabel(c) {
    c.values = [];
    const items = c.found.map(f => {
      const item = document.createElement('li'), key = document.createElement('i'), value = document.createElement('span');
      key.style.borderColor = f.color;
      key.className = f.dashed ? 'dashed' : '';
      value.append(document.createElement('b'), document.createElement('span'));
      item.append(key, f.label ? f.label + ' ' : '', value);
      c.values.push(value);
      return item;
    });
    const more = document.createElement('li');
    more.textContent = items.length > listed ? 'and ' + (items.length - listed) + ' more' : '';
    c.position = document.createElement('li');
    c.list.replaceChildren(...items.slice(0, listed), more, c.position);
  }

  function create(kind) {
    const figure = document.createElement('figure'), caption = document.createElement('figcaption');
    const list = document.createElement('ul'), plot = document.createElement('div'), box = document.createElement('div');
    caption.textContent = kind.title;
    figure.id = 'chart-' + kind.id;
    list.className = 'curves';
    plot.className = 'plot';
    box.className = 'tip';
    box.hidden = true;
    figure.append(caption, list, plot, box);
    const next = kinds.slice(kinds.indexOf(kind) + 1).map(k => charts.get(k.id)).find(Boolean);
    document.getElementById('charts').insertBefore(figure, next ? next.figure : null);
    const c = {kind, figure, list, tip: box, plot: null, shape: '', values: [], found: []};
    charts.set(kind.id, c);
    sizes.observe(figure);
    return c;
  }

  function remove(c) {
    sizes.unobserve(c.figure);
    if (c.plot) c.plot.destroy();
    c.figure.remove();
    charts.delete(c.kind.id);
  }

  // arrange gives the charts sizes that fill the grid, whichever of them there are.
  function arrange() {
    const figures = kinds.map(k => charts.get(k.id)).filter(Boolean).map(c => c.figure);
    const large = figures.length && figures[0].id === 'chart-loss' ? figures.shift() : null, n = figures.length;
    if (large) large.className = n ? 'large' : 'large whole';
    figures.forEach((f, i) => {
      const odd = n % 2 === 1 && i === n - 1;
      f.className = !large && n === 1 ? 'whole' : n <= 2 || odd ? 'double' : '';
    });
    document.getElementById('curves-section').hidden = !charts.size;
  }

  // draw draws the curves of the runs, with markers for those of the shown run.
  function draw(runs, shownMarkers) {
    markers = shownMarkers || [];
    document.getElementById('marker-hint').hidden = !markers.length;
    for (const kind of kinds) {
      const found = tables(kind, runs), c = charts.get(kind.id);
      if (found.length) (c || create(kind)).found = found; else if (c) remove(c);
    }
    arrange();
    for (const c of charts.values()) {
      const {kind, found} = c;
      const shape = JSON.stringify([options, c.figure.className, found.map(f => [f.label, f.color, f.dashed, f.smooth, f.data[0].length < 100, f.data[0].length < 40])]);
      if (c.shape !== shape) {
        if (c.plot) c.plot.destroy();
        c.plot = null;
        relabel(c);
        c.plot = build(kind, c, found);
        c.shape = shape;
      } else {
        c.plot.setData(columns(found), !zoomed(c.plot));
        c.plot.redraw();
      }
      values(c, c.plot.cursor.idx);
      const canvas = c.figure.querySelector('canvas');
      canvas.setAttribute('role', 'img');
      canvas.setAttribute('aria-label', kind.title + ', latest value ' + number(last(found[0].data[1])));
    }
  }

  // zoomed reports whether a person has zoomed into a plot, which new points must not undo.
  function zoomed(u) {
    const x = u.data[0], {min, max} = u.scales.x;
    return x.length > 1 && (min > x[0] || max < x[x.length - 1]);
  }

  const sizes = new ResizeObserver(resize);

  function resize() {
    for (const c of charts.values()) {
      const size = {width: c.figure.clientWidth, height: height(c.figure)};
      if (c.plot && (c.plot.width !== size.width || c.plot.height !== size.height)) c.plot.setSize(size);
    }
  }

  function restyle() { for (const c of charts.values()) c.shape = ''; }

  // picture returns a canvas with all charts, one below the other, with titles and legends.
  function picture() {
    const all = [...charts.values()];
    const canvas = document.createElement('canvas'), ratio = devicePixelRatio || 1, head = 44 * ratio;
    canvas.width = Math.max(...all.map(c => c.plot.ctx.canvas.width));
    canvas.height = all.reduce((h, c) => h + c.plot.ctx.canvas.height + head, 0);
    const g = canvas.getContext('2d');
    g.fillStyle = style('--panel');
    g.fillRect(0, 0, canvas.width, canvas.height);
    let y = 0;
    for (const c of all) {
      g.fillStyle = style('--text');
      g.font = '600 ' + 14 * ratio + 'px system-ui, sans-serif';
      g.fillText(c.kind.title, 8 * ratio, y + 18 * ratio);
      g.font = 12 * ratio + 'px system-ui, sans-serif';
      let x = 8 * ratio;
      c.found.forEach((f, i) => {
        const text = (f.label ? f.label + ' ' : '') + c.values[i].textContent;
        g.fillStyle = f.color;
        g.fillRect(x, y + 31 * ratio, 14 * ratio, 3 * ratio);
        g.fillStyle = style('--soft');
        g.fillText(text, x + 19 * ratio, y + 36 * ratio);
        x += g.measureText(text).width + 36 * ratio;
      });
      g.drawImage(c.plot.ctx.canvas, 0, y + head);
      y += head + c.plot.ctx.canvas.height;
    }
    return canvas;
  }

  return {draw, restyle, picture, options, color, number, clock};
})();
